"""`rayzero ckpt`: list, verify, prune and export checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from rayzero.engine.errors import ConfigError
from rayzero.engine.redact import redact_url
from rayzero.orchestrator.cli.command import (
    JOBS_FOLDER,
    JsonLinesFlag,
    JsonValueFlag,
    local_command,
    new_group,
)
from rayzero.orchestrator.top.format import format_duration, format_size, table_lines

if TYPE_CHECKING:
    from rayzero.engine.checkpoint.catalogue import CheckpointInfo
    from rayzero.engine.checkpoint.verify import FileProblem

PROGRESS_INTERVAL_S = 10.0

commands = new_group("List, verify, prune and export checkpoints.", "rayzero ckpt ls runs/gpt")

CheckpointPath: TypeAlias = Annotated[
    str,
    typer.Argument(
        help="A job's folder (checkpoint.path/name), or one checkpoint in it (step-<n>): a path or "
        "a URL. A name that is not a path is the name of a job in runs/.",
        metavar="PATH",
    ),
]


@commands.command("ls", epilog="Example: rayzero ckpt ls runs/gpt --json")
@local_command
def list_command(path: CheckpointPath, as_json: JsonLinesFlag = False) -> None:
    """List checkpoints: step, age, size, world size, stage, and whether they are complete.

    Reads only manifests and file sizes; `verify` reads all data.
    """
    path = _place(path)
    checkpoints = _require_checkpoints(path)
    if as_json:
        for checkpoint in checkpoints:
            print(json.dumps(_checkpoint_json(checkpoint)))
        return
    rows = [("step", "age", "size", "world", "stage", ""), *map(_table_row, checkpoints)]
    for line in table_lines(rows):
        print(line)


@commands.command("verify", epilog="Example: rayzero ckpt verify runs/gpt/step-200")
@local_command
def verify_command(path: CheckpointPath, as_json: JsonLinesFlag = False) -> int:
    """Read checkpoints completely, and list every file that has changed since it was written.

    Exit code 0: all files are intact. 1: a checkpoint is damaged.
    """
    path = _place(path)
    any_damaged = False
    is_single = _is_one_checkpoint(path)
    for checkpoint in _require_checkpoints(path):
        is_read = is_single or checkpoint.status != "unfinished"
        problems = _find_problems(checkpoint, as_json) if is_read else []
        is_damaged = any(problem.makes_unusable for problem in problems)
        any_damaged = any_damaged or is_damaged
        if as_json:
            fields = {"problems": [asdict(problem) for problem in problems]}
            print(json.dumps(_checkpoint_json(checkpoint) | fields))
        else:
            verdict = "damaged" if is_damaged else "intact" if is_read else checkpoint.problem
            print(f"step {checkpoint.step}: {verdict}", *problems, sep="\n  ")
    return int(any_damaged)


@commands.command(
    "prune", epilog="Example: rayzero ckpt prune runs/gpt --keep 3 --keep-every 1000 --dry-run"
)
@local_command
def prune_command(
    path: Annotated[
        str, typer.Argument(help="A job's folder (checkpoint.path/name).", metavar="PATH")
    ],
    keep: Annotated[
        int, typer.Option(min=1, metavar="N", help="Keep the newest N complete checkpoints.")
    ],
    keep_every: Annotated[
        int | None,
        typer.Option(min=1, metavar="M", help="Also keep checkpoints of steps M, 2 M, 3 M, ..."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be removed.")
    ] = False,
    as_json: JsonValueFlag = False,
) -> None:
    """Remove older checkpoints, and the files of saves that did not complete.

    Exit code 0: removed. 1: something could not be removed. 2: no such folder.
    """
    path = _place(path)
    _require_checkpoints(path)
    from rayzero.engine.checkpoint.catalogue import prune_checkpoints

    result = prune_checkpoints(path, keep, keep_every, dry_run=dry_run)
    if as_json:
        fields = asdict(result)
        print(json.dumps(fields | {"bytes": fields.pop("nbytes"), "dry_run": dry_run}))
        return
    verb = "would be removed" if dry_run else "removed"
    if result.removed:
        print(f"{verb}: steps {', '.join(map(str, result.removed))}")
    if result.swept:
        print(f"{verb}: unfinished saves of steps {', '.join(map(str, result.swept))}")
    print(f"{verb}: {format_size(result.nbytes)}")
    print(f"kept: steps {', '.join(map(str, result.kept)) or 'none'}")


@commands.command(
    "export", epilog="Example: rayzero ckpt export runs/gpt --to out --format safetensors"
)
@local_command
def export_command(
    path: CheckpointPath,
    target: Annotated[
        str, typer.Option("--to", metavar="FOLDER", help="A new or empty local folder.")
    ],
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="safetensors (as transformers reads it), torch (a state dict) or dcp "
            "(torch.distributed.checkpoint, with the optimizer).",
        ),
    ] = "safetensors",
    engine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The engine, if there are several. Default: the first."),
    ] = None,
    as_json: JsonValueFlag = False,
) -> None:
    """Export a checkpoint, or a job's newest complete one, to a format of other libraries.

    Exit code 0: written. 1: it is damaged, or could not be written. 2: no such checkpoint, or a
    folder that is not empty.
    """
    checkpoint = _find_exportable(path)
    folder = path if checkpoint is None else checkpoint.folder  # may be another library's
    # By name: the module imports torch, which the orchestrator must not (see the import contracts).
    export = import_module("rayzero.engine.checkpoint.export").export_checkpoint
    with _byte_progress("exporting", _export_bytes(checkpoint, kind, engine), as_json) as progress:
        files = export(folder, target, kind, progress=progress, engine=engine)
    if as_json:
        print(json.dumps({"folder": redact_url(folder), "format": kind, "files": files}))
        return
    for file in files:
        print(file)


def _place(path: str) -> str:
    """Returns the path itself, or the folder of a job of this name in the default
    `checkpoint.path`."""
    named = Path(JOBS_FOLDER, path)
    is_name = "://" not in path and not Path(path).exists() and named.is_dir()
    return str(named) if is_name else path


def _require_checkpoints(path: str) -> Sequence[CheckpointInfo]:
    from rayzero.engine.checkpoint.catalogue import list_checkpoints

    checkpoints = list_checkpoints(path)
    if not checkpoints:
        raise ConfigError(
            f"there are no checkpoints at {path}",
            allowed="a job's folder with checkpoints (step-<n>), one of them, or the name of a job "
            f"in {JOBS_FOLDER}/",
        )
    return checkpoints


def _find_problems(checkpoint: CheckpointInfo, as_json: bool) -> list[FileProblem]:
    """Reads a checkpoint completely. Returns the files that have changed or are missing."""
    from rayzero.engine.checkpoint.verify import verify_checkpoint

    if checkpoint.status == "newer":
        raise ConfigError(
            f"{checkpoint.folder}: {checkpoint.problem}", fix="upgrade rayzero to read it"
        )
    manifest = checkpoint.manifest
    total = sum(file.block_index.nbytes for file in manifest.files) if manifest else None
    with _byte_progress(f"step {checkpoint.step}", total, as_json) as progress:
        return list(verify_checkpoint(checkpoint.folder, progress))


def _find_exportable(path: str) -> CheckpointInfo | None:
    """Returns the checkpoint at `path`; for a job's folder, its newest complete one. None if there
    is none."""
    from rayzero.engine.checkpoint.catalogue import list_checkpoints, newest_complete

    if not _is_one_checkpoint(path):
        return newest_complete(path)
    return next(iter(list_checkpoints(path)), None)


def _export_bytes(checkpoint: CheckpointInfo | None, kind: str, engine: str | None) -> int | None:
    """Returns how many bytes an export reads: the model; for `dcp` everything. None if unknown."""
    if checkpoint is None or checkpoint.manifest is None:
        return None
    prefixes = ["weights/", "buffers/"]
    if kind == "dcp":
        prefixes.append("optimizer.")
    if engine:
        prefixes = [f"{engine}:{prefix}" for prefix in prefixes]
    return sum(
        tensor.numel * tensor.item_bytes
        for name, tensor in checkpoint.manifest.tensors.items()
        if name.startswith(tuple(prefixes))
    )


def _checkpoint_json(checkpoint: CheckpointInfo) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "step": checkpoint.step,
        "folder": redact_url(checkpoint.folder),
        "condition": checkpoint.status,
        "problem": checkpoint.problem,
        "bytes": sum(entry.nbytes for entry in checkpoint.entries),
        "world_size": manifest.world_size if manifest else None,
        "stage": manifest.stage if manifest else None,
        "created_s": manifest.created_s if manifest else None,
    }


def _table_row(checkpoint: CheckpointInfo) -> tuple[str, ...]:
    fields = _checkpoint_json(checkpoint)
    age = "-" if fields["created_s"] is None else format_duration(time() - fields["created_s"])
    numbers = ("-" if fields[key] is None else str(fields[key]) for key in ("world_size", "stage"))
    status = checkpoint.status + (f": {checkpoint.problem}" if checkpoint.problem else "")
    return (str(checkpoint.step), age, format_size(fields["bytes"]), *numbers, status)


@contextmanager
def _byte_progress(text: str, total: int | None, as_json: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that adds bytes to a progress bar on a terminal; otherwise, one that prints
    a line every 10 s."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(file=sys.stderr)
    if as_json or not console.is_terminal:
        yield print_progress(text, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(24), DownloadColumn(True))
    with Progress(*columns, TransferSpeedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda nbytes: bar.update(task, advance=nbytes)


def print_progress(
    text: str, total: int | None, clock: Callable[[], float] = monotonic
) -> Callable[[int], None]:
    """Returns a function that adds bytes, and prints their sum on stderr at most every 10 s."""
    total_text = "" if total is None else f" of {format_size(total)}"
    done, printed_s = 0, clock()

    def add(nbytes: int) -> None:
        nonlocal done, printed_s
        done += nbytes
        if clock() - printed_s >= PROGRESS_INTERVAL_S:
            printed_s = clock()
            line = f"{text}: {format_size(done)}{total_text} read"
            print(line, file=sys.stderr, flush=True)

    return add


def _is_one_checkpoint(path: str) -> bool:
    """Returns whether the path names one checkpoint, not a job's folder."""
    from rayzero.engine.checkpoint.format import parse_step
    from rayzero.engine.checkpoint.store import split_url

    return parse_step(split_url(path)[1]) is not None
