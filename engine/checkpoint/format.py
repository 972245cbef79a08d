"""File format of checkpoints: layout of a rank's file, names of files and folders.

A rank's file is a valid safetensors file: eight bytes with the length of a JSON header, the header,
the data. The data is the rank's block unchanged. Each range of a logical tensor is a
one-dimensional entry `<name>[start:stop]`; since the format allows no holes, padding is an entry
too. The header is padded with spaces so that the data begins on a page boundary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from secrets import token_hex
from typing import Any

from rayzero.engine.layout.state_index import BlockIndex

FORMAT_VERSION = 2
"""Version of files and manifest. Readers support their own version and older ones. Version 1 has no
files of frozen weights; checkpoints without one are still written as version 1."""

BLOCK_BYTES = 256 * 1024
"""Bytes of data per checksum; reads that verify are rounded out to such blocks."""

MANIFEST_NAME = "manifest.json"
DAMAGE_NAME = "damaged.json"
"""Says which file of a checkpoint was found damaged, for readers that compare sizes only."""
PARTIAL_SUFFIX = ".partial"
"""Suffix of a local file that is not durable yet."""

BASE_FOLDER = "base"
"""The folder beside those of the steps, with the files of frozen weights that steps share."""

BASE_FILE_PATTERN = r"step-[0-9]{1,18}-rank-[0-9]{5,10}-[0-9a-f]{32}-[0-9a-f]{8}\.safetensors"
RANK_FILE_PATTERN = r"rank-[0-9]{5,10}-[0-9a-f]{8}\.safetensors"
_MANIFEST_PATTERN = re.escape(MANIFEST_NAME) + r"(\.[0-9a-f]{8})?"

_STEP_PATTERN = re.compile("step-(0|[1-9][0-9]{0,17})")
_LENGTH_BYTES = 8  # the header's length, a little-endian number in front of it
_PAGE_BYTES = 4096


def step_folder_name(step: int) -> str:
    return f"step-{step}"


def parse_step(name: str) -> int | None:
    """The step of a folder name; None if it is not a checkpoint's."""
    match = _STEP_PATTERN.fullmatch(name)
    return int(match[1]) if match else None


def new_file_name(rank: int) -> str:
    """A unique name for a rank's file. Names are never reused, so a repeated or late write cannot
    change an existing checkpoint, whose manifest lists its files."""
    return f"rank-{rank:05d}-{token_hex(4)}.safetensors"


def base_file_name(step: int, rank: int, digest: str) -> str:
    """A unique name, as `new_file_name`, of a rank's frozen weights. The step is the first one that
    refers to it."""
    return f"step-{step}-rank-{rank:05d}-{digest}-{token_hex(4)}.safetensors"


def base_file_step(name: str) -> int | None:
    """The step in the name of a file of frozen weights, complete or partial; None if it is not
    one."""
    name = name.removesuffix(PARTIAL_SUFFIX).removeprefix(".")
    return int(name.split("-")[1]) if re.fullmatch(BASE_FILE_PATTERN, name) else None


def partial_name(name: str, token: str = "") -> str:
    """The name of a local file until it is durable; a token tells several writers apart."""
    return f".{name}{'.' * bool(token)}{token}{PARTIAL_SUFFIX}"


def is_checkpoint_file(name: str) -> bool:
    """Whether a file name in a step's folder is one of rayzero's, complete or partial."""
    name = name.removesuffix(PARTIAL_SUFFIX).removeprefix(".")
    pattern = rf"{_MANIFEST_PATTERN}|{RANK_FILE_PATTERN}|{re.escape(DAMAGE_NAME)}(\.[0-9a-f]{{8}})?"
    return re.fullmatch(pattern, name) is not None


def block_count(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES)


def file_header(table: BlockIndex, about: Mapping[str, object]) -> bytes:
    """The bytes in front of a rank's data. `about` is for readers of the file: step, rank..."""
    metadata = {"format": "rayzero", "format_version": 1} | dict(about)
    header: dict[str, Any] = {"__metadata__": {key: str(value) for key, value in metadata.items()}}
    for name, dtype, count, begin, end in _header_entries(table):
        header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _PAGE_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _header_entries(table: BlockIndex) -> Iterator[tuple[str, str, int, int, int]]:
    """(name, dtype, elements, first byte, end) of everything in the block, in order, no holes."""
    at = 0
    for part in sorted(table.ranges, key=lambda part: part.offset):
        if part.start == part.stop:
            continue
        if at < part.offset:
            yield f"padding[{at}:{part.offset}]", "U8", part.offset - at, at, part.offset
        tensor = table.tensors[part.name]
        count = part.stop - part.start
        at = part.offset + count * tensor.item_bytes
        yield f"{part.name}[{part.start}:{part.stop}]", tensor.dtype, count, part.offset, at
    if at < table.nbytes:
        yield f"padding[{at}:{table.nbytes}]", "U8", table.nbytes - at, at, table.nbytes


_MAX_PART_BYTES = 255  # limit of file systems for one path component


def is_safe_name(name: str) -> bool:
    """Whether an untrusted relative path, such as a file `latest` contains, stays in its folder.

    It is not absolute and has no `..`, no empty components and no unprintable characters.
    """
    return all(_is_safe_part(part) for part in name.split("/"))


def _is_safe_part(part: str) -> bool:
    try:
        size = len(part.encode())
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return bool(part.strip(". ")) and part.isprintable() and size <= _MAX_PART_BYTES
