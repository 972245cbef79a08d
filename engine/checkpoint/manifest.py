"""The manifest: the file that makes a checkpoint exist. It says all but the tensors' values.

It is one JSON object, `{"checksum": ..., "checkpoint": {...}}`: the checksum is that of the text
behind `"checkpoint":`, so a changed byte shows here as it does in the files. That much, and
`format_version` in it, is the same in every version of the format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from time import time
from typing import Any

from xxhash import xxh3_64_hexdigest

from rayzero.engine.checkpoint.errors import CheckpointDamagedError, CheckpointVersionError
from rayzero.engine.checkpoint.format import FORMAT_VERSION, WrittenFile, block_count, is_rank_file
from rayzero.engine.errors import EngineError
from rayzero.engine.layout.reshard import plan_copies
from rayzero.engine.layout.state_index import DTYPE_BYTES, BlockIndex, LogicalTensor, TensorRange

_PREFIX = b'{"checksum":"%s","checkpoint":'
_PREFIX_BYTES = len(_PREFIX % b"0123456789abcdef")
_SUFFIX = b"}\n"
_CHECKSUM_DIGITS = 16  # of a checksum in hex


@dataclass(frozen=True)
class FileEntry:
    """One rank's file, as the manifest knows it.

    Attributes:
        nbytes: of the whole file; its data is the last `table.nbytes` of them.
        checksum: xxh3-64 of the whole file.
        blocks: xxh3-64 of each `BLOCK_BYTES` of the data.
        small: the rank's JSON part.
    """

    name: str
    nbytes: int
    checksum: int
    blocks: tuple[int, ...]
    block_index: BlockIndex
    metadata: dict[str, Any]

    @property
    def data_offset(self) -> int:
        """Where in the file the data begins."""
        return self.nbytes - self.block_index.nbytes


@dataclass(frozen=True)
class Manifest:
    """A checkpoint.

    Attributes:
        step: finished steps in it.
        stage: the ZeRO stage that wrote it; None where nobody said.
        created_s: seconds since 1970.
        files: by rank.
    """

    job: str
    step: int
    generation: int
    stage: int | None
    created_s: float
    files: tuple[FileEntry, ...]

    @property
    def world_size(self) -> int:
        """Ranks that wrote it."""
        return len(self.files)

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(one.nbytes for one in self.files)

    @property
    def tensors(self) -> dict[str, LogicalTensor]:
        """Every logical tensor in it."""
        return {name: one for file in self.files for name, one in file.block_index.tensors.items()}

    def to_bytes(self) -> bytes:
        """As it is written. Tensors are told once, and ranges call them by number."""
        tensors = self.tensors
        number = {name: index for index, name in enumerate(tensors)}
        content = {
            "format_version": FORMAT_VERSION,
            "job": self.job,
            "step": self.step,
            "generation": self.generation,
            "stage": self.stage,
            "world_size": self.world_size,
            "created_s": self.created_s,
            "tensors": [[name, one.dtype, list(one.shape)] for name, one in tensors.items()],
            "files": [_file_to_json(one, number) for one in self.files],
        }
        text = json.dumps(content, separators=(",", ":")).encode()
        return _PREFIX % xxh3_64_hexdigest(text).encode() + text + _SUFFIX

    @classmethod
    def from_bytes(cls, raw: bytes, where: str) -> Manifest:
        """The way back.

        Args:
            where: what the manifest is called in errors.

        Raises:
            CheckpointDamagedError: it is not what was written.
            CheckpointVersionError: a newer version wrote it.
        """
        try:
            content = _verify_checksum(raw, where)
            tensors = [
                (name, LogicalTensor(dtype, tuple(shape)))
                for name, dtype, shape in content["tensors"]
            ]
            files = tuple(_file_from_json(one, tensors) for one in content["files"])
            if not files or len(files) != content["world_size"]:
                raise ValueError(f"{len(files)} files of {content['world_size']} ranks")
            return cls(
                content["job"],
                content["step"],
                content["generation"],
                content["stage"],
                content["created_s"],
                files,
            )
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointDamagedError(
                f"{where} is not a manifest that rayzero wrote: {error!r}"
            ) from None


def make_manifest(
    job: str,
    step: int,
    generation: int,
    files: Sequence[WrittenFile],
    *,
    stage: int | None = None,
    created_s: float | None = None,
) -> Manifest:
    """The manifest of a step that all ranks of a generation have written.

    Args:
        files: one of each rank, in any order.
        created_s: seconds since 1970; None: now.

    Raises:
        EngineError: the file of a rank is missing.
        MissingRangesError: parts of tensors are in no file.
    """
    files = sorted(files, key=lambda one: one.rank)
    if not files or [one.rank for one in files] != list(range(len(files))):
        ranks = [one.rank for one in files]
        raise EngineError(f"a checkpoint needs one file of each rank; these are of ranks {ranks}")
    entries = tuple(
        FileEntry(
            one.name,
            one.nbytes,
            one.checksum,
            one.blocks,
            BlockIndex.from_json(one.table),
            one.small,
        )
        for one in files
    )
    created_s = time() if created_s is None else created_s
    manifest = Manifest(job, step, generation, stage, created_s, entries)
    whole = [TensorRange(name, 0, one.numel, 0) for name, one in manifest.tensors.items()]
    plan_copies(
        whole, [one.block_index.ranges for one in entries]
    )  # raises where something is missing
    return manifest


def _verify_checksum(raw: bytes, where: str) -> dict[str, Any]:
    """The JSON object behind a checksum that is right."""
    text = raw[_PREFIX_BYTES : -len(_SUFFIX)]
    if raw != _PREFIX % xxh3_64_hexdigest(text).encode() + text + _SUFFIX:
        raise CheckpointDamagedError(f"{where} is damaged: its checksum is another one")
    content: dict[str, Any] = json.loads(text)
    version = content["format_version"]
    if version > FORMAT_VERSION:
        raise CheckpointVersionError(
            f"{where} has format version {version}",
            allowed=f"versions up to {FORMAT_VERSION}",
            fix="a newer rayzero, or which checkpoint is used (checkpoint.resume)",
        )
    return content


def _file_to_json(file: FileEntry, number: dict[str, int]) -> dict[str, Any]:
    table = file.block_index
    return {
        "name": file.name,
        "nbytes": file.nbytes,
        "checksum": f"{file.checksum:016x}",
        "blocks": "".join(f"{one:016x}" for one in file.blocks),
        "data_bytes": table.nbytes,
        "constant_bytes": table.constant_bytes,
        "tensors": [number[name] for name in table.tensors],
        "ranges": [[number[one.name], one.start, one.stop, one.offset] for one in table.ranges],
        "small": file.metadata,
    }


def _file_from_json(
    document: dict[str, Any], tensors: list[tuple[str, LogicalTensor]]
) -> FileEntry:
    """Raises LookupError, TypeError or ValueError where the document cannot be right."""
    table = BlockIndex(
        dict(tensors[number] for number in document["tensors"]),
        tuple(
            TensorRange(tensors[number][0], start, stop, offset)
            for number, start, stop, offset in document["ranges"]
        ),
        document["data_bytes"],
        document["constant_bytes"],
    )
    digits = document["blocks"]
    blocks = tuple(
        int(digits[at : at + _CHECKSUM_DIGITS], 16)
        for at in range(0, len(digits), _CHECKSUM_DIGITS)
    )
    file = FileEntry(
        document["name"],
        document["nbytes"],
        int(document["checksum"], 16),
        blocks,
        table,
        document["small"],
    )
    _check_file(file)
    return file


def _check_file(file: FileEntry) -> None:
    """What a reader relies on: it never reads outside of a file, nor a file of another folder."""
    table = file.block_index
    if not is_rank_file(file.name):
        raise ValueError(f"a file called {file.name!r}")
    if not 0 <= table.nbytes <= file.nbytes:
        raise ValueError(f"{file.name} of {file.nbytes} bytes with {table.nbytes} bytes of data")
    if len(file.blocks) != block_count(table.nbytes):
        raise ValueError(f"{len(file.blocks)} checksums of {table.nbytes} bytes")
    if not isinstance(file.metadata, dict):
        raise ValueError(f"the JSON part of {file.name}")
    for name, tensor in table.tensors.items():
        if tensor.dtype not in DTYPE_BYTES or min(tensor.shape, default=0) < 0:
            raise ValueError(f"{name} of dtype {tensor.dtype} and shape {tensor.shape}")
    for one in table.ranges:
        tensor = table.tensors[one.name]
        end = one.offset + (one.stop - one.start) * tensor.item_bytes
        inside = 0 <= one.start <= one.stop <= prod(tensor.shape)
        if not inside or not 0 <= one.offset <= end <= table.nbytes:
            raise ValueError(f"{one.name}[{one.start}:{one.stop}] at byte {one.offset}")
