"""What the documents of checkpoints may hold. They are validated once, where they are read; the
code behind relies on it. Not imported by vaults: they read no documents, and start without pydantic.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import NotRequired, TypedDict

from rayzero.engine.layout.state_index import DTYPE_BYTES, BlockIndex

_MAX_COUNT = 2**62
_MAX_DEPTH = 100
_MAX_DIMS = 64  # of a tensor, as in torch's and NumPy's iterators

Count = Annotated[int, Field(strict=True, ge=0, le=_MAX_COUNT)]
_Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Name = Annotated[str, Field(max_length=65_536)]  # a length also excludes lone surrogates
_Dtype = Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"]
_Shape = Annotated[tuple[Count, ...], Field(max_length=_MAX_DIMS)]
_Checksum = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
_LENIENT = ConfigDict(extra="allow")  # keys of a later release


class _Scalar(TypedDict):
    dtype: _Dtype
    value: bool | int | float


class _Group(TypedDict):
    options: dict[_Name, Any]
    scalars: NotRequired[dict[_Name, _Scalar | bool | float | str | list[Any] | None]]
    params: NotRequired[list[_Name]]


class _LossScale(TypedDict):
    value: Annotated[_Real, Field(gt=0)]
    hysteresis: Annotated[int, Field(strict=True, ge=-_MAX_COUNT, le=_MAX_COUNT)]
    good_steps: Annotated[int, Field(strict=True, ge=-_MAX_COUNT, le=_MAX_COUNT)]


class Metadata(TypedDict, total=False):
    """A rank's JSON part, as far as it is not decoded by who wrote it (`rng`, `client_state`)."""

    __pydantic_config__ = _LENIENT  # type: ignore[misc]
    step: Count
    rank: Count
    sample_cursor: Count
    skipped_steps: Count
    global_batch: Annotated[Count, Field(ge=1)] | None
    residual_factor: _Real
    loss_scale: _LossScale | None
    groups: list[_Group] | None
    scheduler: dict[_Name, Any] | None
    ties: dict[_Name, _Name] | None
    model_dtypes: dict[_Name, _Dtype] | None
    rng: dict[_Name, Any] | None
    frozen: bool


class RankFileDocument(TypedDict):
    """A rank's file in a manifest; `tensors` and `ranges` refer to the manifest's tensors."""

    name: Annotated[str, Field(pattern=r"^rank-[0-9]{5,10}-[0-9a-f]{8}\.safetensors$")]
    nbytes: Count
    checksum: _Checksum
    blocks: Annotated[str, Field(pattern="^(?:[0-9a-f]{16})*$")]
    data_bytes: Count
    constant_bytes: Count
    tensors: list[Count]
    ranges: list[tuple[Count, Count, Count, Count]]
    small: Metadata


class ManifestDocument(TypedDict):
    """The inner object of a manifest."""

    __pydantic_config__ = _LENIENT  # type: ignore[misc]
    job: _Name
    step: Count
    generation: Count
    stage: Annotated[Count, Field(le=3)] | None
    world_size: Count
    created_s: Annotated[float, Field(strict=True, ge=0, le=1e12)]
    tensors: list[tuple[_Name, _Dtype, _Shape]]
    files: Annotated[list[RankFileDocument], Field(min_length=1)]


MANIFEST: TypeAdapter[ManifestDocument] = TypeAdapter(ManifestDocument)
METADATA: TypeAdapter[Metadata] = TypeAdapter(Metadata)
SHAPE: TypeAdapter[tuple[int, ...]] = TypeAdapter(_Shape)
