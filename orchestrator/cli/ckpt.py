"""Ckpt ls verify prune export.

What `rayzero ckpt` does: each function is one command, and returns the process's exit code.

The arguments of `rayzero ckpt`. Nothing heavy is imported before a command runs.

Each command imports what it does when it does it: that brings xxhash, pyarrow or torch with it, and
`--help` must not wait for them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib import import_module
from time import monotonic, time
from typing import Annotated, Any, TypeAlias

import rich.console
import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from rayzero.engine.checkpoint.catalogue import (
    CheckpointInfo,
    PruneResult,
    list_checkpoints,
    newest_complete,
    prune_checkpoints,
)
from rayzero.engine.checkpoint.format import parse_step
from rayzero.engine.checkpoint.store import split_url
from rayzero.engine.checkpoint.verify import FileProblem, verify_checkpoint
from rayzero.engine.errors import ConfigError
from rayzero.engine.redact import redact_url
from rayzero.orchestrator.cli.remote import with_exit_code
from rayzero.orchestrator.event_text import format_bytes


@with_exit_code
def run_list(path: str, as_json: bool) -> int:
    found = _require_checkpoints(path)
    if as_json:
        for one in found:
            print(json.dumps(_checkpoint_json(one)))
        return 0
    rows = [("step", "age", "size", "world", "stage", ""), *(_table_row(one) for one in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for *figures, condition in rows:
        cells = [text.rjust(width) for text, width in zip(figures, widths, strict=True)]
        print("  ".join([*cells, condition]).rstrip())
    return 0


@with_exit_code
def run_verify(path: str, as_json: bool) -> int:
    damaged = False
    one_only = parse_step(split_url(path)[1]) is not None
    for one in _require_checkpoints(path):
        if one.status == "newer":
            raise ConfigError(f"{one.folder}: {one.problem}", fix="a newer rayzero")
        if one.status == "unfinished" and not one_only:
            problems: list[FileProblem] = []
            verdict = f"step {one.step}: {one.problem}"
        else:
            total = (
                sum(file.block_index.nbytes for file in one.manifest.files)
                if one.manifest
                else None
            )
            with _byte_progress(f"step {one.step}", total, as_json) as progress:
                problems = verify_checkpoint(one.folder, progress)
            harm = [problem for problem in problems if problem.makes_unusable]
            damaged = damaged or bool(harm)
            verdict = f"step {one.step}: {'damaged' if harm else 'as it was written'}"
        if as_json:
            print(
                json.dumps(
                    _checkpoint_json(one) | {"problems": [asdict(each) for each in problems]}
                )
            )
            continue
        print(verdict)
        for problem in problems:
            print(f"  {problem}")
    return 1 if damaged else 0


@with_exit_code
def run_prune(path: str, keep: int, keep_every: int | None, dry_run: bool, as_json: bool) -> int:
    _require_checkpoints(path)
    pruned = prune_checkpoints(path, keep, keep_every, dry_run=dry_run)
    if as_json:
        facts = asdict(pruned)
        print(json.dumps(facts | {"bytes": facts.pop("nbytes"), "dry_run": dry_run}))
        return 0
    for line in _pruned_lines(pruned, "would be removed" if dry_run else "removed"):
        print(line)
    return 0


@with_exit_code
def run_export(path: str, target: str, kind: str, as_json: bool) -> int:
    found = _checkpoint_to_export(path)
    folder = path if found is None else found.folder  # or it is another system's
    # By name: it needs torch, which nothing else here does.
    export = import_module("rayzero.engine.checkpoint.export").export_checkpoint
    with _byte_progress(
        "exporting", None if found is None else _export_bytes(found, kind), as_json
    ) as told:
        written = export(folder, target, kind, progress=told)
    if as_json:
        print(json.dumps({"folder": redact_url(folder), "format": kind, "files": written}))
        return 0
    for file in written:
        print(file)
    return 0


def _checkpoint_to_export(path: str) -> CheckpointInfo | None:
    """Of a job's folder the newest whole one; None if there is no checkpoint of ours."""
    if parse_step(split_url(path)[1]) is None:
        return newest_complete(path)
    return next(iter(list_checkpoints(path)), None)


def _export_bytes(found: CheckpointInfo, kind: str) -> int | None:
    """The bytes that an export reads: the model, and in a `dcp` all there is."""
    if found.manifest is None:
        return None
    return sum(
        one.numel * one.item_bytes
        for name, one in found.manifest.tensors.items()
        if kind == "dcp" or name.startswith(("weights/", "buffers/"))
    )


def _require_checkpoints(path: str) -> Sequence[CheckpointInfo]:
    found = list_checkpoints(path)
    if not found:
        raise ConfigError(
            f"there are no checkpoints at {path}",
            allowed="a job's folder with checkpoints step-<n> in it, or one of these",
        )
    return found


def _checkpoint_json(one: CheckpointInfo) -> dict[str, Any]:
    manifest = one.manifest
    return {
        "step": one.step,
        "folder": redact_url(one.folder),
        "condition": one.status,
        "problem": one.problem,
        "bytes": sum(entry.nbytes for entry in one.entries),
        "world_size": manifest.world_size if manifest else None,
        "stage": manifest.stage if manifest else None,
        "created_s": manifest.created_s if manifest else None,
    }


def _table_row(one: CheckpointInfo) -> tuple[str, ...]:
    manifest = one.manifest
    return (
        str(one.step),
        _format_age(time() - manifest.created_s) if manifest else "-",
        format_bytes(sum(entry.nbytes for entry in one.entries)),
        str(manifest.world_size) if manifest else "-",
        "-" if manifest is None or manifest.stage is None else str(manifest.stage),
        one.status + (f": {one.problem}" if one.problem else ""),
    )


def _pruned_lines(pruned: PruneResult, verb: str) -> Iterator[str]:
    if pruned.removed:
        yield f"{verb}: steps {', '.join(map(str, pruned.removed))}"
    if pruned.swept:
        yield f"{verb}: leftovers of saves of steps {', '.join(map(str, pruned.swept))}"
    yield f"{verb}: {format_bytes(pruned.nbytes)}"
    yield f"kept: steps {', '.join(map(str, pruned.kept)) or 'none'}"


@contextmanager
def _byte_progress(text: str, total: int | None, as_json: bool) -> Iterator[Callable[[int], None]]:
    """A bar over bytes, where somebody looks at a terminal; lines elsewhere if it takes long."""
    err = rich.console.Console(file=sys.stderr)
    if as_json or not err.is_terminal:
        yield PeriodicProgress(text, total, partial(print, file=sys.stderr, flush=True))
        return
    columns = (TextColumn("{task.description}"), BarColumn(24), DownloadColumn(True))
    with Progress(*columns, TransferSpeedColumn(), console=err, transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda nbytes: bar.update(task, advance=nbytes)


class PeriodicProgress:
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
        self._total_text = "" if total is None else f" of {format_bytes(total)}"
        self._write = write
        self._every_s = every_s
        self._clock = clock
        self._done = 0
        self._last_print_s = clock()

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        if (now_s := self._clock()) - self._last_print_s >= self._every_s:
            self._last_print_s = now_s
            self._write(f"{self._text}: {format_bytes(self._done)}{self._total_text} read")


def _format_age(seconds: float) -> str:
    for unit, length_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


ckpt = typer.Typer(
    help="List, verify, prune and export checkpoints.",
    epilog="Example: rayzero ckpt ls runs/gpt",
    no_args_is_help=True,
    add_completion=False,
)

CheckpointPath: TypeAlias = Annotated[
    str,
    typer.Argument(
        help="A job's folder (checkpoint.path/name) or one checkpoint in it (step-<n>); a path or "
        "a URL.",
        metavar="PATH",
    ),
]


JsonLinesFlag: TypeAlias = Annotated[
    bool, typer.Option("--json", help="JSON lines on stdout, one for each checkpoint.")
]


JsonValueFlag: TypeAlias = Annotated[bool, typer.Option("--json", help="One JSON value on stdout.")]


@ckpt.command("ls", epilog="Example: rayzero ckpt ls runs/gpt --json")
def list_(path: CheckpointPath, as_json: JsonLinesFlag = False) -> None:
    """List checkpoints: step, age, size, world size, stage, and whether they are whole.

    Only manifests and sizes are read; `verify` reads everything.
    """

    raise typer.Exit(run_list(path, as_json))


@ckpt.command(epilog="Example: rayzero ckpt verify runs/gpt/step-200")
def verify(path: CheckpointPath, as_json: JsonLinesFlag = False) -> None:
    """Read checkpoints whole, and name every file that is not as it was written.

    Exit code 0: all are as they were written. 1: one is damaged.
    """

    raise typer.Exit(run_verify(path, as_json))


@ckpt.command(epilog="Example: rayzero ckpt prune runs/gpt --keep 3 --keep-every 1000 --dry-run")
def prune(
    path: Annotated[
        str, typer.Argument(help="A job's folder (checkpoint.path/name).", metavar="PATH")
    ],
    keep: Annotated[int, typer.Option(min=1, metavar="N", help="Keep the newest N whole ones.")],
    keep_every: Annotated[
        int | None,
        typer.Option(min=1, metavar="M", help="Keep, besides, every step that M divides."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: JsonValueFlag = False,
) -> None:
    """Remove older checkpoints, and what is left of saves that did not end.

    Exit code 0: removed. 1: something could not be removed. 2: no such folder.
    """

    raise typer.Exit(run_prune(path, keep, keep_every, dry_run, as_json))


@ckpt.command(epilog="Example: rayzero ckpt export runs/gpt --to out --format safetensors")
def export(
    path: CheckpointPath,
    to: Annotated[str, typer.Option(metavar="FOLDER", help="A new or empty local folder.")],
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="safetensors (as transformers reads it), torch (a state dict) or dcp "
            "(torch.distributed.checkpoint, with the optimizer).",
        ),
    ] = "safetensors",
    as_json: JsonValueFlag = False,
) -> None:
    """Write a checkpoint as files that others read. Of a job, the newest whole one.

    Exit code 0: written. 1: it is damaged, or could not be written. 2: no such checkpoint, or a
    folder that is not empty.
    """

    raise typer.Exit(run_export(path, to, kind, as_json))
