"""What each policy does to weights and inputs."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rayzero.engine.precision.policy import Bf16, Native

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


class Slots:
    """Nothing that is looked into."""

    def __init__(self) -> None:
        self.x = torch.ones(1)


def test_floats_are_cast_and_nothing_else() -> None:
    cast = Bf16().cast_inputs
    assert cast(torch.ones(2)).dtype is LOW
    assert cast(torch.ones(2).double()).dtype is LOW
    for tensor in (torch.ones(2).long(), torch.ones(2).bool(), torch.ones(2).to(torch.complex64)):
        assert cast(tensor) is tensor
    slots = Slots()
    for thing in (None, 3, 1.5, "text", slots, Batch):
        assert cast(thing) is thing
    assert slots.x.dtype is torch.float32


def test_containers_keep_their_kind() -> None:
    x = torch.ones(2)
    cast = Bf16().cast_inputs
    kept: Any
    for kept in ([x, 1], (x, 1), {"x": x}, OrderedDict(x=x), defaultdict(list, x=x)):
        found = cast(kept)
        assert type(found) is type(kept)
        assert len(found) == len(kept)
        assert next(iter(found.values() if isinstance(found, dict) else found)).dtype is LOW
        assert x.dtype is torch.float32  # and what was given is left as it was
    assert kept["x"] is x
    assert cast(kept)["another"] == []
    assert cast(torch.Size([2, 3])) == torch.Size([2, 3])
    assert cast(UserDict(x=x))["x"] is x  # not a dict, and not looked into


def test_named_tuples_and_dataclasses() -> None:
    cast = Bf16().cast_inputs
    point = cast(Point(torch.ones(2), "a"))
    assert isinstance(point, Point)
    assert (point.x.dtype, point.label) == (LOW, "a")
    batch = cast(Batch(torch.ones(3), {"y": torch.ones(1)}))
    assert isinstance(batch, Batch)
    assert (batch.x.dtype, batch.inner["y"].dtype, batch.size) == (LOW, LOW, 3)


def test_gradients_flow_through_a_cast() -> None:
    x = torch.ones(2, requires_grad=True)
    Bf16().cast_inputs({"x": [x]})["x"][0].sum().backward()
    assert x.grad is not None


def test_native_leaves_all_as_it_is() -> None:
    policy, value = Native(), {"x": torch.ones(1)}
    assert policy.cast_inputs(value) is value
    weights = torch.ones(3, dtype=torch.float64)
    assert policy.main_weights(weights, weights) is weights
    assert policy.model_dtype(torch.float64) is policy.main_dtype(torch.float64) is torch.float64
    policy.publish(weights, weights)
    assert policy.average_first


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bf16_keeps_main_weights_of_its_own_in_fp32(dtype: torch.dtype) -> None:
    policy, original = Bf16(), torch.tensor([1 / 3, 2.0]).to(dtype)
    assert policy.model_dtype(dtype) is LOW
    assert policy.main_dtype(dtype) is torch.float32
    model = original.to(LOW, copy=True)
    main = policy.main_weights(original, model)
    assert main.dtype is torch.float32
    assert torch.equal(main, original.float())  # from the original values, not the rounded ones
    assert main.data_ptr() not in (original.data_ptr(), model.data_ptr())
    main.add_(1)
    policy.publish(main, model)
    assert torch.equal(model, main.to(LOW))


def test_bf16_leaves_whole_numbers_alone() -> None:
    assert Bf16().model_dtype(torch.int64) is torch.int64
    assert Bf16().model_dtype(torch.bool) is torch.bool
