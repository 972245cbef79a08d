"""Finds the blocks of the files of a source once, and keeps them in a folder: the index."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import pyarrow as pa
import xxhash

from rayzero.engine.data.streams.kept_tables import KeptTables
from rayzero.engine.data.streams.sources.files import SourceFile, SourceReader, read_checked
from rayzero.engine.data.streams.sources.formats import FileBlock, Format
from rayzero.engine.errors import DataError

log = logging.getLogger(__name__)

_VERSION = 1
_SCANS = 16  # files at a time: they wait for the store more than for the processor
PROGRESS_S = 10.0


def find_blocks(
    files: Sequence[SourceFile], form: Format, index_dir: str | None, retry_s: float
) -> tuple[pa.Table, pa.Schema]:
    """Returns a table with a row for each block (file number, start, nbytes, rows, checksum), and
    the columns of all files together. Takes both from `index_dir` if they are kept there, by a name
    that has a digest of the files' names, sizes and times: an index of other files is never used.
    Raises DataError if a file cannot be read, which it names, or the folder cannot be used."""
    if index_dir is None:
        return _scan(files, form, retry_s)
    kept = KeptTables(index_dir, "index_dir of rayzero.data.blocks")
    name = f"blocks-{listing_digest(files, form.options)}.arrow"
    table = kept.load(name)
    if table is not None:
        schema = pa.ipc.read_schema(pa.py_buffer(table.schema.metadata[b"columns"]))
        return table.replace_schema_metadata(), schema
    table, schema = _scan(files, form, retry_s)
    columns = {"columns": schema.serialize().to_pybytes()}
    kept.keep(name, table.replace_schema_metadata(columns))
    return table, schema


def listing_digest(files: Sequence[SourceFile], options: str) -> str:
    """Hashes names, sizes and times of files, and the options by which they are cut."""
    listing = [[file.url, file.nbytes, file.modified_s] for file in files]
    return xxhash.xxh3_128_hexdigest(json.dumps([_VERSION, options, listing]).encode())


def _scan(files: Sequence[SourceFile], form: Format, retry_s: float) -> tuple[pa.Table, pa.Schema]:
    readers: list[SourceReader] = []

    def scan(reader: SourceReader) -> tuple[list[FileBlock], pa.Schema]:
        readers.append(reader)
        return form.scan(reader)

    with ThreadPoolExecutor(_SCANS, "index") as pool:
        try:
            futures = [pool.submit(read_checked, file, "", scan, retry_s) for file in files]
            while (state := wait(futures, PROGRESS_S, FIRST_EXCEPTION)).not_done:
                for future in state.done:
                    future.result()  # raises the error of a file, if there is one
                read_bytes = sum(reader.tell() for reader in readers.copy())
                log.info(
                    "indexing: %d of %d files are done, %.0f MiB read",
                    len(state.done),
                    len(files),
                    read_bytes / 2**20,
                )
            found = [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    schema = found[0][1]
    for file, (_, file_schema) in zip(files, found, strict=True):
        try:
            schema = form.merge(schema, file_schema)
        except (pa.ArrowException, ValueError) as error:
            raise DataError(
                f"{file.url} does not fit the files before it: {error}",
                "files with the same columns of the same types",
                "give columns= or schema=, or leave the file out",
            ) from error
    blocks = [(number, block) for number, (part, _) in enumerate(found) for block in part]
    columns = {"file": pa.array([number for number, _ in blocks], pa.int32())}
    for name in ("start", "nbytes", "rows"):
        columns[name] = pa.array([getattr(block, name) for _, block in blocks], pa.int64())
    columns["checksum"] = pa.array([block.checksum for _, block in blocks], pa.uint64())
    return pa.table(columns), schema
