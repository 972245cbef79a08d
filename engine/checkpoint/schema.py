"""The allowed content of the JSON documents in checkpoints, validated once, where they are read.

Vaults read no documents and must start fast, so they do not import this module, which imports
pydantic.
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rayzero.engine.checkpoint.format import BASE_FILE_PATTERN, BASE_FOLDER, RANK_FILE_PATTERN
from rayzero.engine.layout.state_index import BlockIndex
from rayzero.engine.validation import repr_value

T = TypeVar("T")

_MAX_COUNT = 2**62
_MAX_DEPTH = 100
_MAX_VALUES = 2**20
_PLAIN_TYPES = (bool, int, float, str, type(None), list, tuple, dict)
_MAX_DIMS = 64  # of a tensor; the limit of torch's and NumPy's iterators

Count = Annotated[int, Field(strict=True, ge=0, le=_MAX_COUNT)]
_Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Name = Annotated[str, Field(max_length=2048)]  # max_length also excludes lone surrogates
_Floats = Literal["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"]
_Dtype = _Floats | Literal["I64", "I32", "I16", "I8", "U8", "BOOL"]
_Shape = Annotated[tuple[Count, ...], Field(max_length=_MAX_DIMS)]
_Checksum = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
_Blocks = Annotated[str, Field(pattern="^(?:[0-9a-f]{16})*$")]


class _Scalar(BaseModel, strict=True):
    dtype: _Dtype
    value: bool | int | float


class _Group(BaseModel):
    options: dict[_Name, Any]
    scalars: dict[_Name, _Scalar | bool | float | str | list[Any] | None] = {}
    params: list[_Name] = []


class _LossScale(BaseModel):
    value: Annotated[_Real, Field(gt=0)]
    hysteresis: Annotated[int, Field(strict=True, ge=-_MAX_COUNT, le=_MAX_COUNT)]
    good_steps: Annotated[int, Field(strict=True, ge=-_MAX_COUNT, le=_MAX_COUNT)]


class Metadata(BaseModel):
    """A rank's JSON part. The values in `rng` and `client_state` are checked when decoded."""

    model_config = ConfigDict(protected_namespaces=())  # there is a key model_dtypes
    step: Count = 0
    rank: Count = 0
    sample_cursor: Count = 0
    skipped_steps: Count = 0
    bad_samples: Count = 0
    global_batch: Annotated[Count, Field(ge=1)] | None = None
    residual_factor: _Real = 1.0
    loss_scale: _LossScale | None = None
    groups: list[_Group] | None = None
    scheduler: dict[_Name, Any] | None = None
    ties: dict[_Name, _Name] | None = None
    model_dtypes: dict[_Name, _Dtype] | None = None
    rng: dict[_Name, Any] | None = None
    frozen: Annotated[bool, Field(strict=True)] = True


class _BaseDocument(BaseModel):
    name: Annotated[str, Field(pattern=f"^{BASE_FOLDER}/{BASE_FILE_PATTERN}$")]
    nbytes: Count
    checksum: _Checksum
    blocks: _Blocks
    data_bytes: Count


class RankFileDocument(_BaseDocument):
    """A rank's file in a manifest; `tensors` and `ranges` refer to the manifest's tensors."""

    name: Annotated[str, Field(pattern=f"^{RANK_FILE_PATTERN}$")]
    constant_bytes: Count
    tensors: list[Count]
    ranges: list[tuple[Count, Count, Count, Count]]
    small: dict[_Name, Any]
    base: _BaseDocument | None = None


class ManifestDocument(BaseModel):
    """The inner object of a manifest."""

    job: _Name
    step: Count
    generation: Count
    stage: Annotated[Count, Field(le=3)] | None
    world_size: Count
    created_s: Annotated[float, Field(strict=True, ge=0, le=1e12)]
    tensors: list[tuple[_Name, _Dtype, _Shape]]
    files: Annotated[list[RankFileDocument], Field(min_length=1)]


class _WeightIndex(BaseModel):
    weight_map: dict[_Name, _Name]


INDEX: TypeAdapter[_WeightIndex] = TypeAdapter(_WeightIndex)
MANIFEST: TypeAdapter[ManifestDocument] = TypeAdapter(ManifestDocument)
METADATA: TypeAdapter[Metadata] = TypeAdapter(Metadata)
PADDINGS: TypeAdapter[list[list[int]]] = TypeAdapter(list[list[Count]])
SHAPES: TypeAdapter[dict[str, tuple[int, ...]]] = TypeAdapter(dict[_Name, _Shape])


def validate(schema: TypeAdapter[T], document: Any) -> T:
    """Returns the parsed document. Raises ValueError, which names the first mistake."""
    try:
        return schema.validate_python(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = repr_value(".".join(str(part) for part in first["loc"]))
        raise ValueError(f"{path}: {first['msg']}, not {repr_value(first['input'])}") from None


def check_metadata(metadata: dict[str, Any]) -> None:
    """Raises ValueError if a rank's JSON part violates the schema. The script's `client_state` is
    checked when it is decoded."""
    validate(METADATA, metadata)
    check_plain([value for key, value in metadata.items() if key != "client_state"])


def check_plain(level: list[Any]) -> None:
    """Raises ValueError unless all values are lists, dictionaries, text, numbers, bool or None."""
    for _ in range(_MAX_DEPTH):
        values, level = level, []
        for value in values:
            if not isinstance(value, _PLAIN_TYPES) or (type(value) is int and abs(value) >> 63):
                raise ValueError(f"{repr_value(value)} is not text, nor a number of 64 bits")
            if isinstance(value, dict | list | tuple):
                level += value.values() if isinstance(value, dict) else value
        if len(level) > _MAX_VALUES:  # a list that occurs twice in each level doubles their number
            break
    if level:
        raise ValueError(f"more than {_MAX_DEPTH} levels, or {_MAX_VALUES} values in one level")


def check_index(table: BlockIndex) -> None:
    """Raises LookupError or ValueError unless each range is inside its tensor and the block, and
    all ranges together have at most the block's bytes. So readers access no bytes outside of the
    block, and allocate no more memory than the blocks have bytes."""
    sizes = {name: (tensor.numel, tensor.item_bytes) for name, tensor in table.tensors.items()}
    for name, tensor in table.tensors.items():
        if prod(max(1, size) for size in tensor.shape) * tensor.item_bytes > _MAX_COUNT:
            raise ValueError(f"{name} of shape {tensor.shape}")
    free = table.nbytes
    for part in table.ranges:
        numel, item_bytes = sizes[part.name]
        nbytes = (part.stop - part.start) * item_bytes
        free -= nbytes
        inside = 0 <= part.start <= part.stop <= numel
        if not inside or not 0 <= part.offset <= part.offset + nbytes <= table.nbytes or free < 0:
            raise ValueError(f"{part.name}[{part.start}:{part.stop}] at byte {part.offset}")
