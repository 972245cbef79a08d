"""`rayzero data`: contents of a stream's files, and the samples of a step."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

import typer

from rayzero.engine.errors import ConfigError
from rayzero.engine.redact import redact_url
from rayzero.orchestrator.cli.command import JsonValueFlag, local_command, new_group
from rayzero.orchestrator.top.format import format_size, table_lines

if TYPE_CHECKING:
    from rayzero.engine.data.streams.sources.file_blocks import FileBlocks, FormatName
    from rayzero.engine.data.streams.sources.image_folder import ImageFolder

MAX_FILES = 20
"""Maximum number of files that the table shows."""
MAX_STEP = 1 << 40
MAX_BATCH = 1 << 22
"""The product of `MAX_STEP` and `MAX_BATCH` is a position, which must fit in an int64."""

commands = new_group(
    "Inspect the data of streams.", "rayzero data inspect 's3://bucket/web/*.parquet'"
)


DataPaths: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        help="Files, folders or patterns, as for rayzero.data.blocks: paths, or URLs with s3, gs "
        "or hdfs.",
        metavar="PATHS...",
    ),
]
StepOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_STEP,
        metavar="N",
        help="Print the samples of this step of a stream of these files, counted from 1 as in the "
        "ledger.",
    ),
]


@commands.command(
    "inspect",
    epilog="Example: rayzero data inspect 's3://bucket/web/*.parquet' --step 1000 --batch 64",
)
@local_command
def inspect_command(
    paths: DataPaths,
    kind: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="parquet, json, webdataset or images; default: by the names of the files.",
        ),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="A,B", help="Only these columns; default: all.")
    ] = None,
    step: StepOption = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_BATCH, metavar="B", help="The train_batch_size with which the job began."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="The job's seed.")] = 0,
    window: Annotated[
        int, typer.Option(min=1, metavar="W", help="The stream's shuffle_window.")
    ] = 16,
    as_json: JsonValueFlag = False,
) -> None:
    """Print files, blocks, rows, bytes and columns of data, and the samples of a step.

    Reads only what is needed to find the blocks: footers of Parquet files, headers of tar files,
    JSON lines files completely. Inspect the sources of a mixture one by one.

    Exit code 0: printed. 1: there are no files, or one cannot be read. 2: wrong arguments.
    """
    if step is not None and batch is None:
        raise ConfigError("--step is given without a batch size", "--step N --batch B")
    from rayzero.engine.data.streams.sources.file_blocks import blocks

    with _log_on_stderr():
        source = blocks(
            paths if len(paths) > 1 else paths[0],
            columns.split(",") if columns is not None else None,
            cast("FormatName | None", kind),
        )
    value = _describe(source)
    if step is not None and batch is not None:
        value["step"] = {"step": step, "train_batch_size": batch, "seed": seed, "window": window}
        value["samples"] = list(_samples(source, step, batch, seed, window))
    if as_json:
        print(json.dumps(value))
        return
    for line in _lines(value):
        print(line)


@contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Shows the progress of a long scan."""
    log = logging.getLogger("rayzero.engine.data")
    handler = logging.StreamHandler()
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _describe(source: FileBlocks | ImageFolder) -> dict[str, Any]:
    files = [
        {"url": redact_url(file.url), "bytes": file.nbytes, "modified_s": file.modified_s}
        for file in source.files
    ]
    if (numbers := getattr(source, "file_numbers", None)) is not None:
        import numpy as np  # --help loads no numpy

        blocks = np.bincount(numbers, minlength=len(files))
        rows = np.bincount(numbers, weights=source.counts, minlength=len(files))
        for file, block_count, row_count in zip(files, blocks, rows, strict=True):
            file |= {"blocks": int(block_count), "rows": int(row_count)}
    return {
        "name": redact_url(source.name),
        "blocks": len(source.counts),
        "rows": int(source.counts.sum()),
        "rows_of_a_block": [int(source.counts.min()), int(source.counts.max())],
        "bytes": sum(file.nbytes for file in source.files),
        "columns": {field.name: str(field.type) for field in source.schema},
        "fingerprint": source.fingerprint,
        "files": files,
    }


def _samples(
    source: FileBlocks | ImageFolder, step: int, batch: int, seed: int, window: int
) -> Iterator[dict[str, Any]]:
    """Yields the samples of a step in order, as in a job with a stream of this source."""
    from rayzero.engine.data.streams.order import BlockOrder, StreamOrder

    order = StreamOrder([BlockOrder(source.counts, seed, window, batch)], None, batch)
    places = order.places((step - 1) * batch, batch)
    for block, row, number in zip(places.blocks, places.rows, places.numbers, strict=True):
        where = redact_url(source.describe(int(block)))
        yield {"block": int(block), "row": int(row), "number": int(number), "where": where}


def _lines(value: dict[str, Any]) -> Iterator[str]:
    least, most = value["rows_of_a_block"]
    files = value["files"]
    yield (
        f"{value['name']}: {len(files):,} files, {value['blocks']:,} blocks of {least:,} to "
        f"{most:,} rows, {value['rows']:,} rows, {format_size(value['bytes'])}"
    )
    yield "columns: " + ", ".join(f"{name} ({kind})" for name, kind in value["columns"].items())
    shown = [file for file in files if "blocks" in file][:MAX_FILES]
    rows = [
        (f"{file['blocks']:,}", f"{file['rows']:,}", format_size(file["bytes"]), file["url"])
        for file in shown
    ]
    if rows:
        yield from table_lines([("blocks", "rows", "size", "file"), *rows])
    if shown and len(files) > len(shown):
        yield f"and {len(files) - len(shown):,} more: --json has all"
    if "samples" in value:
        step = value["step"]
        yield (
            f"step {step['step']} with a train_batch_size of {step['train_batch_size']}, seed "
            f"{step['seed']} and a shuffle_window of {step['window']}:"
        )
        cells = [
            (f"{sample['number']}", f"{sample['block']}", f"{sample['row']}", sample["where"])
            for sample in value["samples"]
        ]
        yield from table_lines([("number", "block", "row", "place"), *cells])
