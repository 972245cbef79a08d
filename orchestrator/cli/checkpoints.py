"""What `rayzero ckpt` does: each function is one command, and returns the process's exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib import import_module
from time import monotonic, time
from typing import Any

import rich.console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from rayzero.engine.checkpoint.catalogue import Found, list_checkpoints, newest_whole
from rayzero.engine.checkpoint.format import step_of
from rayzero.engine.checkpoint.prune import Pruned, prune
from rayzero.engine.checkpoint.store import split
from rayzero.engine.checkpoint.verify import Problem, verify
from rayzero.engine.errors import ConfigError
from rayzero.engine.masking import masked
from rayzero.orchestrator.cli.codes import with_exit_code
from rayzero.orchestrator.cli.texts import size_text


@with_exit_code
def list_all(path: str, as_json: bool) -> int:
    found = _checkpoints(path)
    if as_json:
        for one in found:
            print(json.dumps(_facts(one)))
        return 0
    rows = [("step", "age", "size", "world", "stage", ""), *(_row(one) for one in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for *figures, condition in rows:
        cells = [text.rjust(width) for text, width in zip(figures, widths, strict=True)]
        print("  ".join([*cells, condition]).rstrip())
    return 0


@with_exit_code
def verify_all(path: str, as_json: bool) -> int:
    damaged = False
    one_only = step_of(split(path)[1]) is not None
    for one in _checkpoints(path):
        if one.condition == "newer":
            raise ConfigError(f"{one.folder}: {one.problem}", fix="a newer rayzero")
        if one.condition == "unfinished" and not one_only:
            problems: list[Problem] = []
            verdict = f"step {one.step}: {one.problem}"
        else:
            total = sum(file.table.nbytes for file in one.manifest.files) if one.manifest else None
            with _progress(f"step {one.step}", total, as_json) as progress:
                problems = verify(one.folder, progress)
            harm = [problem for problem in problems if problem.harms]
            damaged = damaged or bool(harm)
            verdict = f"step {one.step}: {'damaged' if harm else 'as it was written'}"
        if as_json:
            print(json.dumps(_facts(one) | {"problems": [asdict(each) for each in problems]}))
            continue
        print(verdict)
        for problem in problems:
            print(f"  {problem}")
    return 1 if damaged else 0


@with_exit_code
def prune_job(path: str, keep: int, keep_every: int | None, dry_run: bool, as_json: bool) -> int:
    _checkpoints(path)
    pruned = prune(path, keep, keep_every, dry_run=dry_run)
    if as_json:
        facts = asdict(pruned)
        print(json.dumps(facts | {"bytes": facts.pop("nbytes"), "dry_run": dry_run}))
        return 0
    for line in _pruned_lines(pruned, "would be removed" if dry_run else "removed"):
        print(line)
    return 0


@with_exit_code
def export_one(path: str, target: str, kind: str, as_json: bool) -> int:
    found = _exported(path)
    folder = path if found is None else found.folder  # or it is another system's
    # By name: it needs torch, which nothing else here does.
    export = import_module("rayzero.engine.checkpoint.export").export
    with _progress("exporting", None if found is None else _read_by(found, kind), as_json) as told:
        written = export(folder, target, kind, progress=told)
    if as_json:
        print(json.dumps({"folder": masked(folder), "format": kind, "files": written}))
        return 0
    for file in written:
        print(file)
    return 0


def _exported(path: str) -> Found | None:
    """Of a job's folder the newest whole one; None if there is no checkpoint of ours."""
    if step_of(split(path)[1]) is None:
        return newest_whole(path)
    return next(iter(list_checkpoints(path)), None)


def _read_by(found: Found, kind: str) -> int | None:
    """The bytes that an export reads: the model, and in a `dcp` all there is."""
    if found.manifest is None:
        return None
    return sum(
        one.numel * one.item_bytes
        for name, one in found.manifest.tensors.items()
        if kind == "dcp" or name.startswith(("weights/", "buffers/"))
    )


def _checkpoints(path: str) -> Sequence[Found]:
    found = list_checkpoints(path)
    if not found:
        raise ConfigError(
            f"there are no checkpoints at {path}",
            allowed="a job's folder with checkpoints step-<n> in it, or one of these",
        )
    return found


def _facts(one: Found) -> dict[str, Any]:
    manifest = one.manifest
    return {
        "step": one.step,
        "folder": masked(one.folder),
        "condition": one.condition,
        "problem": one.problem,
        "bytes": sum(entry.nbytes for entry in one.entries),
        "world_size": manifest.world_size if manifest else None,
        "stage": manifest.stage if manifest else None,
        "created_s": manifest.created_s if manifest else None,
    }


def _row(one: Found) -> tuple[str, ...]:
    manifest = one.manifest
    return (
        str(one.step),
        _age(time() - manifest.created_s) if manifest else "-",
        size_text(sum(entry.nbytes for entry in one.entries)),
        str(manifest.world_size) if manifest else "-",
        "-" if manifest is None or manifest.stage is None else str(manifest.stage),
        one.condition + (f": {one.problem}" if one.problem else ""),
    )


def _pruned_lines(pruned: Pruned, verb: str) -> Iterator[str]:
    if pruned.removed:
        yield f"{verb}: steps {', '.join(map(str, pruned.removed))}"
    if pruned.swept:
        yield f"{verb}: leftovers of saves of steps {', '.join(map(str, pruned.swept))}"
    yield f"{verb}: {size_text(pruned.nbytes)}"
    yield f"kept: steps {', '.join(map(str, pruned.kept)) or 'none'}"


@contextmanager
def _progress(text: str, total: int | None, as_json: bool) -> Iterator[Callable[[int], None]]:
    """A bar over bytes, where somebody looks at a terminal; lines elsewhere if it takes long."""
    err = rich.console.Console(file=sys.stderr)
    if as_json or not err.is_terminal:
        yield Milestones(text, total, partial(print, file=sys.stderr, flush=True))
        return
    columns = (TextColumn("{task.description}"), BarColumn(24), DownloadColumn(True))
    with Progress(*columns, TransferSpeedColumn(), console=err, transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda nbytes: bar.update(task, advance=nbytes)


class Milestones:
    """Tells of bytes in a line every `every_s` seconds: nothing of what is done before that.

    Args:
        total: None where nobody knows.
    """

    def __init__(
        self,
        text: str,
        total: int | None,
        write: Callable[[str], None],
        every_s: float = 10.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._text = text
        self._of = "" if total is None else f" of {size_text(total)}"
        self._write = write
        self._every_s = every_s
        self._clock = clock
        self._done = 0
        self._told_s = clock()

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        if (now_s := self._clock()) - self._told_s >= self._every_s:
            self._told_s = now_s
            self._write(f"{self._text}: {size_text(self._done)}{self._of} read")


def _age(seconds: float) -> str:
    for unit, length_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
