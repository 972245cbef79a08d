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
files of frozen weights. A checkpoint without such files is still written as version 1."""

BLOCK_BYTES = 256 * 1024
"""Bytes of data that one checksum covers. Verified reads are rounded out to whole blocks."""

MANIFEST_NAME = "manifest.json"
DAMAGE_NAME = "damaged.json"
"""Name of the file that records a damaged file, for readers that compare only sizes."""
PARTIAL_SUFFIX = ".partial"
"""Suffix of a local file until the file is durable."""

BASE_FOLDER = "base"
"""Folder next to the step folders, with the files of frozen weights that checkpoints share."""

BASE_FILE_PATTERN = r"step-[0-9]{1,18}-rank-[0-9]{5,10}-[0-9a-f]{32}-[0-9a-f]{8}\.safetensors"
RANK_FILE_PATTERN = r"rank-[0-9]{5,10}-[0-9a-f]{8}\.safetensors"
_MANIFEST_PATTERN = re.escape(MANIFEST_NAME) + r"(\.[0-9a-f]{8})?"

_STEP_PATTERN = re.compile("step-(0|[1-9][0-9]{0,17})")
_LENGTH_BYTES = 8  # a little-endian number in front of the header: the header's length
_PAGE_BYTES = 4096


def step_folder_name(step: int) -> str:
    return f"step-{step}"


def parse_step(name: str) -> int | None:
    """Returns the step in a folder's name; None if the folder is not a checkpoint's."""
    match = _STEP_PATTERN.fullmatch(name)
    return int(match[1]) if match else None


def new_file_name(rank: int) -> str:
    """Returns a unique name for a rank's file. Names are never reused, so a repeated or late write
    cannot change the files that an existing manifest lists."""
    return f"rank-{rank:05d}-{token_hex(4)}.safetensors"


def base_file_name(step: int, rank: int, digest: str) -> str:
    """Returns a unique name for a file of a rank's frozen weights. `step` is the first step whose
    checkpoint refers to the file; `digest` identifies the content."""
    return f"step-{step}-rank-{rank:05d}-{digest}-{token_hex(4)}.safetensors"


def base_file_step(name: str) -> int | None:
    """Returns the step in the name of a file of frozen weights, complete or partial; None for
    other names."""
    name = name.removesuffix(PARTIAL_SUFFIX).removeprefix(".")
    return int(name.split("-")[1]) if re.fullmatch(BASE_FILE_PATTERN, name) else None


def partial_name(name: str, token: str = "") -> str:
    """Returns the name of a local file until it is durable. Writers of the same file differ in
    `token`."""
    return f".{name}.{token}{PARTIAL_SUFFIX}" if token else f".{name}{PARTIAL_SUFFIX}"


def is_checkpoint_file(name: str) -> bool:
    """Returns whether a file name in a step's folder is one of rayzero's, complete or partial."""
    name = name.removesuffix(PARTIAL_SUFFIX).removeprefix(".")
    pattern = rf"{_MANIFEST_PATTERN}|{RANK_FILE_PATTERN}|{re.escape(DAMAGE_NAME)}(\.[0-9a-f]{{8}})?"
    return re.fullmatch(pattern, name) is not None


def block_count(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES)


def file_header(table: BlockIndex, about: Mapping[str, object]) -> bytes:
    """Returns the bytes in front of a rank's data. `about` has further metadata: step, rank, ..."""
    metadata = {"format": "rayzero", "format_version": 1} | dict(about)
    header: dict[str, Any] = {"__metadata__": {key: str(value) for key, value in metadata.items()}}
    for name, dtype, count, begin, end in _header_entries(table):
        header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _PAGE_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _header_entries(table: BlockIndex) -> Iterator[tuple[str, str, int, int, int]]:
    """Yields (name, dtype, elements, first byte, end byte) of the tensor ranges and the padding, in
    order and without holes."""
    end = 0
    for part in sorted(table.ranges, key=lambda part: part.offset):
        if part.start == part.stop:
            continue
        if end < part.offset:
            yield f"padding[{end}:{part.offset}]", "U8", part.offset - end, end, part.offset
        tensor = table.tensors[part.name]
        count = part.stop - part.start
        end = part.offset + count * tensor.item_bytes
        yield f"{part.name}[{part.start}:{part.stop}]", tensor.dtype, count, part.offset, end
    if end < table.nbytes:
        yield f"padding[{end}:{table.nbytes}]", "U8", table.nbytes - end, end, table.nbytes


_MAX_PART_BYTES = 255  # limit of file systems for one path component


def is_safe_name(name: str) -> bool:
    """Returns whether an untrusted relative path, such as the content of a file `latest`, stays
    inside its folder: it is not absolute, and has no `..`, no empty components and no unprintable
    characters."""
    return all(_is_safe_part(part) for part in name.split("/"))


def _is_safe_part(part: str) -> bool:
    try:
        size = len(part.encode())
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return bool(part.strip(". ")) and part.isprintable() and size <= _MAX_PART_BYTES
