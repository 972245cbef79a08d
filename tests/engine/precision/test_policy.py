"""Precision policies: casts of weights and inputs."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rayzero.engine.precision.policy import MixedPrecision, Precision

LOW = torch.bfloat16


class Point(NamedTuple):
    x: Tensor
    label: str


@dataclass(frozen=True)
class Batch:
    x: Tensor
    inner: dict[str, Tensor]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.x.numel())


class Opaque:
    """A class that is not a container."""

    def __init__(self) -> None:
        self.x = torch.ones(1)


def test_only_floats_are_cast() -> None:
    cast = MixedPrecision(dtype=LOW).cast_inputs
    assert cast(torch.ones(2)).dtype is LOW
    assert cast(torch.ones(2).double()).dtype is LOW
    for tensor in (torch.ones(2).long(), torch.ones(2).bool(), torch.ones(2).to(torch.complex64)):
        assert cast(tensor) is tensor
    opaque = Opaque()
    for value in (None, 3, 1.5, "text", opaque, Batch):
        assert cast(value) is value
    assert opaque.x.dtype is torch.float32


def test_containers_keep_their_type() -> None:
    x = torch.ones(2)
    cast = MixedPrecision(dtype=LOW).cast_inputs
    container: Any
    for container in ([x, 1], (x, 1), {"x": x}, OrderedDict(x=x), defaultdict(list, x=x)):
        cast_value = cast(container)
        assert type(cast_value) is type(container)
        assert len(cast_value) == len(container)
        assert (
            next(iter(cast_value.values() if isinstance(cast_value, dict) else cast_value)).dtype
            is LOW
        )
        assert x.dtype is torch.float32  # the input is not modified
    assert container["x"] is x
    assert cast(container)["another"] == []
    assert cast(torch.Size([2, 3])) == torch.Size([2, 3])
    cast_value = cast(MappingProxyType({"x": x, "y": 1}))  # it has no copy that could be changed
    assert (cast_value["x"].dtype, cast_value["y"]) == (LOW, 1)


class Encoding(UserDict):
    """Like transformers' BatchEncoding: a UserDict with extra attributes."""

    def __init__(self, data: dict[str, Any], n_sequences: int) -> None:
        super().__init__(data)
        self.n_sequences = n_sequences


class Sealed(OrderedDict):
    """Like transformers' ModelOutput: items can be set, but not updated."""

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError


def test_mappings_that_are_not_plain_dictionaries() -> None:
    ids, pixels = torch.ones(2).long(), torch.ones(2)
    cast = MixedPrecision(dtype=LOW).cast_inputs
    given = Encoding({"ids": ids, "pixels": pixels}, 3)
    cast_value = cast(given)
    assert isinstance(cast_value, Encoding)
    assert (cast_value["pixels"].dtype, cast_value["ids"] is ids, cast_value.n_sequences) == (
        LOW,
        True,
        3,
    )
    assert given["pixels"] is pixels
    sealed = Sealed()
    sealed["x"] = pixels
    assert type(cast(sealed)) is Sealed
    assert (cast(sealed)["x"].dtype, sealed["x"] is pixels) == (LOW, True)


def test_containers_without_floats_are_returned_unchanged() -> None:
    cast, ids, low = (
        MixedPrecision(dtype=LOW).cast_inputs,
        torch.ones(2).long(),
        torch.ones(2, dtype=LOW),
    )
    for value in (
        {"ids": ids, "more": [low, (1, None)]},
        [ids, {"x": low}],
        (ids, "text"),
        Point(low, "a"),
        Batch(low, {"y": ids}),
        Encoding({"ids": ids}, 1),
        torch.Size([2, 3]),
    ):
        assert cast(value) is value
    shared = {"ids": ids}
    assert cast([shared, torch.ones(1)])[0] is shared


def test_input_casting_can_be_disabled() -> None:
    given = {"x": torch.ones(2)}
    assert MixedPrecision(dtype=torch.float16, input_casting=False).cast_inputs(given) is given
    assert MixedPrecision(dtype=torch.float16).cast_inputs(given)["x"].dtype is torch.float16


def test_named_tuples_and_dataclasses() -> None:
    cast = MixedPrecision(dtype=LOW).cast_inputs
    point = cast(Point(torch.ones(2), "a"))
    assert isinstance(point, Point)
    assert (point.x.dtype, point.label) == (LOW, "a")
    batch = cast(Batch(torch.ones(3), {"y": torch.ones(1)}))
    assert isinstance(batch, Batch)
    assert (batch.x.dtype, batch.inner["y"].dtype, batch.size) == (LOW, LOW, 3)


def test_gradients_flow_through_a_cast() -> None:
    x = torch.ones(2, requires_grad=True)
    MixedPrecision(dtype=LOW).cast_inputs({"x": [x]})["x"][0].sum().backward()
    assert x.grad is not None


def test_native_precision_changes_nothing() -> None:
    policy, value = Precision(), {"x": torch.ones(1)}
    assert policy.cast_inputs(value) is value
    weights = torch.ones(3, dtype=torch.float64)
    assert policy.main_weights(weights, weights) is weights
    assert policy.model_dtype(torch.float64) is torch.float64
    policy.copy_to_model(weights, weights)
    assert policy.average_before_reduce


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bf16_has_main_weights_in_fp32(dtype: torch.dtype) -> None:
    policy, original = MixedPrecision(dtype=LOW), torch.tensor([1 / 3, 2.0]).to(dtype)
    assert policy.model_dtype(dtype) is LOW
    model = original.to(LOW, copy=True)
    main = policy.main_weights(original, model)
    assert main.dtype is torch.float32
    assert torch.equal(main, original.float())  # from the original values, not the rounded ones
    assert main.data_ptr() not in (original.data_ptr(), model.data_ptr())
    main.add_(1)
    policy.copy_to_model(main, model)
    assert torch.equal(model, main.to(LOW))


def test_bf16_keeps_integers() -> None:
    assert MixedPrecision(dtype=LOW).model_dtype(torch.int64) is torch.int64
    assert MixedPrecision(dtype=LOW).model_dtype(torch.bool) is torch.bool
