"""The manifest: the file whose existence makes a checkpoint exist. It lists files and contents.

One JSON object, `{"checksum": ..., "checkpoint": {...}}`; the checksum is of the text after
`"checkpoint":`. This envelope and the key `format_version` in it never change between versions.
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
    """The manifest's entry of one rank's file.

    Attributes:
        nbytes: size of the file; its data is the last `block_index.nbytes` bytes.
        checksum: xxh3-64 of the whole file.
        blocks: xxh3-64 of each `BLOCK_BYTES` of the data.
        metadata: the rank's JSON part.
    """

    name: str
    nbytes: int
    checksum: int
    blocks: tuple[int, ...]
    block_index: BlockIndex
    metadata: dict[str, Any]

    @property
    def data_offset(self) -> int:
        """Offset of the data in the file."""
        return self.nbytes - self.block_index.nbytes


@dataclass(frozen=True)
class Manifest:
    """A checkpoint.

    Attributes:
        step: finished steps.
        stage: the ZeRO stage that wrote it; None if unknown.
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
        """Number of ranks that wrote the checkpoint."""
        return len(self.files)

    @property
    def nbytes(self) -> int:
        """Total size of the files."""
        return sum(file.nbytes for file in self.files)

    @property
    def tensors(self) -> dict[str, LogicalTensor]:
        """All logical tensors by name."""
        return {
            name: tensor for file in self.files for name, tensor in file.block_index.tensors.items()
        }

    def to_bytes(self) -> bytes:
        """Serialise. Ranges refer to tensors by their index in one list."""
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
            "tensors": [[name, it.dtype, list(it.shape)] for name, it in tensors.items()],
            "files": [_file_to_json(file, number) for file in self.files],
        }
        text = json.dumps(content, separators=(",", ":")).encode()
        return _PREFIX % xxh3_64_hexdigest(text).encode() + text + _SUFFIX

    @classmethod
    def from_bytes(cls, raw: bytes, where: str) -> Manifest:
        """Parse and verify.

        Args:
            where: path or URL for error messages.

        Raises:
            CheckpointDamagedError: the content is not what was written.
            CheckpointVersionError: a newer version wrote it.
        """
        try:
            content = _verify_checksum(raw, where)
            tensors = [
                (name, LogicalTensor(dtype, tuple(shape)))
                for name, dtype, shape in content["tensors"]
            ]
            files = tuple(_file_from_json(file, tensors) for file in content["files"])
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
    files = sorted(files, key=lambda file: file.rank)
    ranks = [file.rank for file in files]
    if not files or ranks != list(range(len(files))):
        raise EngineError(f"a checkpoint needs one file of each rank; these are of ranks {ranks}")
    entries = tuple(
        FileEntry(
            file.name,
            file.nbytes,
            file.checksum,
            file.blocks,
            BlockIndex.from_json(file.table),
            file.small,
        )
        for file in files
    )
    created_s = time() if created_s is None else created_s
    manifest = Manifest(job, step, generation, stage, created_s, entries)
    full = [TensorRange(name, 0, it.numel, 0) for name, it in manifest.tensors.items()]
    plan_copies(full, [entry.block_index.ranges for entry in entries])  # raises MissingRangesError
    return manifest


def _verify_checksum(raw: bytes, where: str) -> dict[str, Any]:
    """The JSON object, after comparing its checksum."""
    text = raw[_PREFIX_BYTES : -len(_SUFFIX)]
    if raw != _PREFIX % xxh3_64_hexdigest(text).encode() + text + _SUFFIX:
        raise CheckpointDamagedError(f"{where} is damaged: its checksum does not match")
    content: dict[str, Any] = json.loads(text)
    version = content["format_version"]
    if version > FORMAT_VERSION:
        raise CheckpointVersionError(
            f"{where} has format version {version}",
            allowed=f"versions up to {FORMAT_VERSION}",
            fix="upgrade rayzero, or select another checkpoint (checkpoint.resume)",
        )
    return content


def _file_to_json(file: FileEntry, number: dict[str, int]) -> dict[str, Any]:
    table = file.block_index
    return {
        "name": file.name,
        "nbytes": file.nbytes,
        "checksum": f"{file.checksum:016x}",
        "blocks": "".join(f"{checksum:016x}" for checksum in file.blocks),
        "data_bytes": table.nbytes,
        "constant_bytes": table.constant_bytes,
        "tensors": [number[name] for name in table.tensors],
        "ranges": [[number[it.name], it.start, it.stop, it.offset] for it in table.ranges],
        "small": file.metadata,
    }


def _file_from_json(
    document: dict[str, Any], tensors: list[tuple[str, LogicalTensor]]
) -> FileEntry:
    """Raises LookupError, TypeError or ValueError if the document is invalid."""
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
    """Check what readers rely on: no access outside of a file or to a file of another folder."""
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
    for part in table.ranges:
        tensor = table.tensors[part.name]
        end = part.offset + (part.stop - part.start) * tensor.item_bytes
        inside = 0 <= part.start <= part.stop <= prod(tensor.shape)
        if not inside or not 0 <= part.offset <= end <= table.nbytes:
            raise ValueError(f"{part.name}[{part.start}:{part.stop}] at byte {part.offset}")
