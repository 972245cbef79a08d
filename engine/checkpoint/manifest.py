"""The manifest: the file whose existence makes a checkpoint exist. It lists files and contents.

It is one JSON object, `{"checksum": ..., "checkpoint": {...}}`. The checksum covers the text after
`"checkpoint":`. This envelope and the key `format_version` in it never change between versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import time
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_hexdigest

from rayzero.engine.checkpoint.errors import CheckpointDamagedError, CheckpointVersionError
from rayzero.engine.checkpoint.format import FORMAT_VERSION, block_count
from rayzero.engine.errors import EngineError, first_line
from rayzero.engine.layout.reshard import plan_copies
from rayzero.engine.layout.state_index import BlockIndex, LogicalTensor, TensorRange

if TYPE_CHECKING:
    from rayzero.engine.checkpoint.schema import RankFileDocument

_PREFIX = b'{"checksum":"%s","checkpoint":'
_PREFIX_BYTES = len(_PREFIX % b"0123456789abcdef")
_SUFFIX = b"}\n"
_CHECKSUM_DIGITS = 16  # of a checksum in hex


@dataclass(frozen=True)
class DataFile:
    """A durable file of a checkpoint.

    Attributes:
        name: path relative to the job's folder for a file in `BASE_FOLDER`, otherwise to the
            step's folder.
        nbytes: size of the file; its data is the last `data_bytes` bytes.
        checksum: xxh3-64 of the whole file, in hex.
        blocks: xxh3-64 of each `BLOCK_BYTES` of the data, in hex, one after another; the last block
            may be shorter.
    """

    name: str
    nbytes: int
    checksum: str
    blocks: str
    data_bytes: int

    @property
    def data_offset(self) -> int:
        return self.nbytes - self.data_bytes

    def block_matches(self, number: int, data: memoryview) -> bool:
        digits = slice(number * _CHECKSUM_DIGITS, (number + 1) * _CHECKSUM_DIGITS)
        return xxh3_64_hexdigest(data) == self.blocks[digits]


@dataclass(frozen=True)
class RankFile(DataFile):
    """One rank's durable file of a checkpoint.

    Attributes:
        block_index: index of all data of the rank, including the data in `base`.
        metadata: the rank's JSON part.
        base: the file of the first `block_index.constant_bytes` bytes of the rank's data, which
            other checkpoints may share; None if these bytes are in this file.
    """

    rank: int
    block_index: BlockIndex
    metadata: dict[str, Any]
    base: DataFile | None = None

    @property
    def data_files(self) -> tuple[DataFile, ...]:
        """The files that hold the rank's data, in the order of the data."""
        return (self.base, self) if self.base else (self,)


@dataclass(frozen=True)
class Manifest:
    """A checkpoint.

    Attributes:
        step: number of finished steps.
        stage: ZeRO stage of the run that wrote the checkpoint; None if unknown.
        created_s: seconds since 1970.
        files: one for each rank, in the order of ranks.
    """

    job: str
    step: int
    generation: int
    stage: int | None
    created_s: float
    files: tuple[RankFile, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote the checkpoint."""
        return len(self.files)

    @property
    def tensors(self) -> dict[str, LogicalTensor]:
        return {
            name: tensor for file in self.files for name, tensor in file.block_index.tensors.items()
        }

    @property
    def data_files(self) -> list[DataFile]:
        return [file for entry in self.files for file in entry.data_files]

    @property
    def base_names(self) -> set[str]:
        return {entry.base.name for entry in self.files if entry.base}

    def wrong_sizes(self, sizes: Mapping[str, int]) -> dict[str, str]:
        """Returns the problem of each file, by name, whose size in `sizes` is wrong or missing."""
        return {
            file.name: f"has {sizes[file.name]} bytes instead of {file.nbytes}"
            if file.name in sizes
            else "is missing"
            for file in self.data_files
            if sizes.get(file.name) != file.nbytes
        }

    def to_bytes(self) -> bytes:
        """Returns the JSON text. Ranges refer to tensors by their index in one list."""
        tensors = self.tensors
        number = {name: index for index, name in enumerate(tensors)}
        content = vars(self) | {
            "format_version": FORMAT_VERSION if self.base_names else 1,
            "world_size": self.world_size,
            "tensors": [
                [name, tensor.dtype, list(tensor.shape)] for name, tensor in tensors.items()
            ],
            "files": [_file_to_json(file, number) for file in self.files],
        }
        text = json.dumps(content, separators=(",", ":")).encode()
        return _PREFIX % xxh3_64_hexdigest(text).encode() + text + _SUFFIX

    @classmethod
    def from_bytes(cls, raw: bytes, where: str) -> Manifest:
        """Parses and verifies a manifest. `where` is its path or URL for messages. Raises
        CheckpointDamagedError if the content is not what was written, CheckpointVersionError if a
        newer version wrote it."""
        # Imported here: vaults write checkpoint files, and start without pydantic.
        from rayzero.engine.checkpoint.schema import MANIFEST, validate

        try:
            content = validate(MANIFEST, _verify_checksum(raw, where))
            tensors = [
                (name, LogicalTensor(dtype, shape)) for name, dtype, shape in content.tensors
            ]
            files = tuple(
                _file_from_json(rank, file, tensors) for rank, file in enumerate(content.files)
            )
            if len(files) != content.world_size:
                raise ValueError(f"{len(files)} files of {content.world_size} ranks")
            if len(dict(tensors)) != len(tensors):
                raise ValueError("two tensors of one name")
        except CheckpointVersionError:  # a ValueError, as every ConfigError is
            raise
        except (LookupError, ValueError, RecursionError) as error:
            raise CheckpointDamagedError(
                f"{where} is not a manifest that rayzero wrote: {first_line(error)}"
            ) from None
        return cls(
            content.job, content.step, content.generation, content.stage, content.created_s, files
        )


def make_manifest(
    job: str, step: int, generation: int, files: Sequence[RankFile], *, stage: int | None = None
) -> Manifest:
    """Returns the manifest of a step that all ranks of a generation have written. `files` has one
    file of each rank, in any order. Raises EngineError if the file of a rank is missing,
    MissingRangesError if parts of tensors are in no file."""
    files = sorted(files, key=lambda file: file.rank)
    ranks = [file.rank for file in files]
    if not files or ranks != list(range(len(files))):
        raise EngineError(f"a checkpoint needs one file of each rank; these are of ranks {ranks}")
    manifest = Manifest(job, step, generation, stage, time(), tuple(files))
    full = [TensorRange(name, 0, tensor.numel, 0) for name, tensor in manifest.tensors.items()]
    plan_copies(full, [file.block_index.ranges for file in files])  # raises MissingRangesError
    return manifest


def _verify_checksum(raw: bytes, where: str) -> Any:
    """Returns the inner JSON object, after comparing checksum and version."""
    text = raw[_PREFIX_BYTES : -len(_SUFFIX)]
    if raw != _PREFIX % xxh3_64_hexdigest(text).encode() + text + _SUFFIX:
        raise CheckpointDamagedError(f"{where} is damaged: its checksum does not match")
    content: Any = json.loads(text)
    version = content.get("format_version") if isinstance(content, dict) else None
    if type(version) is not int or version < 1:
        raise ValueError("no format version")
    if version > FORMAT_VERSION:
        raise CheckpointVersionError(
            f"{where} has format version {version}",
            allowed=f"versions up to {FORMAT_VERSION}",
            fix="upgrade rayzero, or select another checkpoint (checkpoint.resume)",
        )
    return content


def _file_to_json(file: RankFile, number: dict[str, int]) -> dict[str, Any]:
    table = file.block_index
    base = {"base": vars(file.base)} if file.base else {}
    return base | {
        "name": file.name,
        "nbytes": file.nbytes,
        "checksum": file.checksum,
        "blocks": file.blocks,
        "data_bytes": table.nbytes,
        "constant_bytes": table.constant_bytes,
        "tensors": [number[name] for name in table.tensors],
        "ranges": [
            [number[part.name], part.start, part.stop, part.offset] for part in table.ranges
        ],
        "small": file.metadata,
    }


def _file_from_json(
    rank: int, document: RankFileDocument, tensors: list[tuple[str, LogicalTensor]]
) -> RankFile:
    """Raises LookupError or ValueError if the document contradicts itself."""
    from rayzero.engine.checkpoint.schema import check_index, check_metadata

    table = BlockIndex(
        dict(tensors[number] for number in document.tensors),
        tuple(TensorRange(tensors[number][0], *numbers) for number, *numbers in document.ranges),
        document.data_bytes,
        document.constant_bytes,
    )
    if not table.constant_bytes <= table.nbytes:
        raise ValueError(f"{document.name} with {table.nbytes} bytes of data")
    base = DataFile(**dict(document.base)) if document.base else None
    if base and base.data_bytes != table.constant_bytes:
        raise ValueError(f"{base.name} with {base.data_bytes} bytes of {table.constant_bytes}")
    file = RankFile(
        document.name,
        document.nbytes,
        document.checksum,
        document.blocks,
        table.nbytes - (base.data_bytes if base else 0),
        rank,
        table,
        document.small,
        base,
    )
    for part in file.data_files:
        if part.data_offset < 0 or len(part.blocks) != (
            block_count(part.data_bytes) * _CHECKSUM_DIGITS
        ):
            raise ValueError(f"{part.name}: {part.data_bytes} bytes of data, of {part.nbytes}")
    check_index(table)
    check_metadata(document.small)
    return file
