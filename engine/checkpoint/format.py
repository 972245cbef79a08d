"""Rank file layout, safe names.

What a rank's file of a checkpoint looks like, byte by byte.

A file is a safetensors file that any safetensors reader opens: eight bytes with the length of a
JSON header, the header, the data. The data is the rank's block as it lies. Each range of a logical
tensor is an entry `<name>[start:stop]`, one-dimensional; that format allows no holes, so what is in
no range is an entry too. The header is padded with spaces, so that the data begins on a page.

Names that lead nowhere but into the folder that they are looked for in. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from rayzero.engine.layout.state_index import BlockIndex

FORMAT_VERSION = 1
"""Of the files and of the manifest. A reader knows its own version and older ones."""

BLOCK_BYTES = 256 * 1024
"""So many bytes of a file's data have one checksum, and are read together to verify it."""

MANIFEST_NAME = "manifest.json"


PARTIAL_SUFFIX = ".partial"
"""How a file's name ends until it is durable, on a local disk."""

_STEP_PATTERN = re.compile(r"step-(0|[1-9]\d*)")


_RANK_FILE_PATTERN = re.compile(r"rank-\d{5,}-[0-9a-f]{8}\.safetensors")


_LENGTH_BYTES = 8  # the header's length, a little-endian number in front of it


_PAGE_BYTES = 4096


@dataclass(frozen=True)
class WrittenFile:
    """One rank's file of a checkpoint, durable.

    Args:
        nbytes: of the whole file; its data is the last `table["nbytes"]` of them.
        checksum: xxh3-64 of the whole file.
        blocks: xxh3-64 of each `BLOCK_BYTES` of the data, the last one shorter.
        table: of the file's data, as `BlockIndex.to_json` gives it.
        small: the rank's JSON part.
        seconds: from open to durable.
    """

    name: str
    rank: int
    nbytes: int
    checksum: int
    blocks: tuple[int, ...]
    table: dict[str, Any]
    small: dict[str, Any]
    seconds: float


def step_folder_name(step: int) -> str:
    """The name of a step's folder in the job's folder."""
    return f"step-{step}"


def parse_step(name: str) -> int | None:
    """The step of a folder with that name; None if it is not a checkpoint's."""
    found = _STEP_PATTERN.fullmatch(name)
    return int(found[1]) if found else None


def new_file_name(rank: int) -> str:
    """A name for a rank's file. No name is ever used twice, so neither a repeated nor a belated
    write can touch a checkpoint that exists: which files are in it, its manifest says."""
    return f"rank-{rank:05d}-{token_hex(4)}.safetensors"


def is_checkpoint_file(name: str) -> bool:
    """Whether a file in a step's folder is called as only we call files, finished or not."""
    name = name.removesuffix(PARTIAL_SUFFIX).removeprefix(".")
    return name == MANIFEST_NAME or _RANK_FILE_PATTERN.fullmatch(name) is not None


def is_rank_file(name: str) -> bool:
    """Whether a manifest may list a file of that name."""
    return _RANK_FILE_PATTERN.fullmatch(name) is not None


def block_count(nbytes: int) -> int:
    """How many checksums so many bytes of data have."""
    return -(-nbytes // BLOCK_BYTES)


def file_header(table: BlockIndex, about: Mapping[str, object]) -> bytes:
    """Everything in front of a rank's data.

    Args:
        about: told to readers of the file, as text: step, rank...
    """
    told = {"format": "rayzero", "format_version": FORMAT_VERSION} | dict(about)
    header: dict[str, Any] = {"__metadata__": {key: str(value) for key, value in told.items()}}
    for name, dtype, count, begin, end in _header_entries(table):
        header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _PAGE_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _header_entries(table: BlockIndex) -> Iterator[tuple[str, str, int, int, int]]:
    """(name, dtype, elements, first byte, end) of everything in the block, in order, no holes."""
    at = 0
    for one in sorted(table.ranges, key=lambda one: one.offset):
        if one.start == one.stop:
            continue
        if at < one.offset:
            yield f"padding[{at}:{one.offset}]", "U8", one.offset - at, at, one.offset
        tensor = table.tensors[one.name]
        count = one.stop - one.start
        at = one.offset + count * tensor.item_bytes
        yield f"{one.name}[{one.start}:{one.stop}]", tensor.dtype, count, one.offset, at
    if at < table.nbytes:
        yield f"padding[{at}:{table.nbytes}]", "U8", table.nbytes - at, at, table.nbytes


_MAX_PART_BYTES = 255  # of one part: what file systems allow


def is_safe_name(name: str) -> bool:
    """Whether `name`, with `/` between folders, is that of something below a folder, whatever wrote
    it: a script, a file called `latest` that came with a checkpoint.

    Neither absolute, nor with `..` or empty parts, nor with characters that end or hide a name.
    """
    return all(_is_safe_part(part) for part in name.split("/"))


def _is_safe_part(part: str) -> bool:
    try:
        size = len(part.encode())
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return bool(part.strip(". ")) and part.isprintable() and size <= _MAX_PART_BYTES
