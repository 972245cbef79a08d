"""Precision policies: casts of weights and inputs."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rayzero.engine.precision.policy import Precision
from rayzero.engine.tensor_tree import iter_tensors

LOW = torch.bfloat16
BF16 = Precision(dtype=LOW, wide_main=True)


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


class Encoding(UserDict):
    """Like transformers' BatchEncoding: a UserDict with extra attributes."""

    def __init__(self, data: dict[str, Any], n_sequences: int) -> None:
        super().__init__(data)
        self.n_sequences = n_sequences


class Sealed(OrderedDict):
    """Like transformers' ModelOutput: items can be set, but not updated."""

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError


def sealed(x: Tensor) -> Sealed:
    made = Sealed()
    made["x"] = x
    return made


# name: (a container of a tensor, what must be as before in one that was cast)
CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], bool]]] = {
    "list": (lambda x: [x, 1, [x, (None, "text")]], lambda made: made[1] == 1),
    "tuple": (lambda x: (x, 1), lambda made: made[1] == 1),
    "dict": (lambda x: {"x": x, "y": 1}, lambda made: made["y"] == 1),
    "ordered": (lambda x: OrderedDict(x=x), lambda made: list(made) == ["x"]),
    "defaultdict": (lambda x: defaultdict(list, x=x), lambda made: made["other"] == []),
    "named tuple": (lambda x: Point(x, "a"), lambda made: made.label == "a"),
    "dataclass": (lambda x: Batch(x, {"y": x}), lambda made: made.size == 2),
    "encoding": (lambda x: Encoding({"x": x}, 3), lambda made: made.n_sequences == 3),
    "sealed": (sealed, lambda made: list(made) == ["x"]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_floats_are_cast_in_containers_of_the_same_type(name: str) -> None:
    cast, (make, is_kept) = BF16.cast_inputs, CONTAINERS[name]
    x, ids = torch.ones(2), torch.ones(2).long()
    given = make(x)
    made = cast(given)
    assert type(made) is type(given)
    assert is_kept(made)
    found = [*iter_tensors(made)] if not isinstance(made, UserDict) else [made["x"]]
    assert {tensor.dtype for tensor in found} == {LOW}
    assert all(tensor is x for tensor in iter_tensors(given))  # the input is not modified
    for unchanged in (make(ids), make(x.to(LOW))):
        assert cast(unchanged) is unchanged
    assert cast([unchanged, x])[0] is unchanged


def test_other_values_are_not_cast() -> None:
    cast = BF16.cast_inputs
    assert cast(torch.ones(2).double()).dtype is LOW
    for tensor in (torch.ones(2).long(), torch.ones(2).bool(), torch.ones(2).to(torch.complex64)):
        assert cast(tensor) is tensor
    for value in (None, 3, 1.5, "text", object(), Batch, torch.Size([2, 3])):
        assert cast(value) is value
    assert cast(MappingProxyType({"x": torch.ones(1), "y": 1}))["x"].dtype is LOW  # a plain dict


def test_gradients_flow_through_a_cast() -> None:
    x = torch.ones(2, requires_grad=True)
    BF16.cast_inputs({"x": [x]})["x"][0].sum().backward()
    assert x.grad is not None


def test_native_precision_changes_nothing() -> None:
    policy, value = Precision(), {"x": torch.ones(1)}
    assert policy.cast_inputs(value) is value
    weights = torch.ones(3, dtype=torch.float64)
    assert policy.main_weights(weights, weights) is weights
    assert policy.model_dtype(torch.float64) is torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bf16_has_main_weights_in_fp32(dtype: torch.dtype) -> None:
    policy, original = BF16, torch.tensor([1 / 3, 2.0]).to(dtype)
    assert policy.model_dtype(dtype) is LOW
    assert policy.model_dtype(torch.int64) is torch.int64
    model = original.to(LOW, copy=True)
    main = policy.main_weights(original, model)
    assert main.dtype is torch.float32
    assert torch.equal(main, original.float())  # from the original values, not the rounded ones
    assert main.data_ptr() not in (original.data_ptr(), model.data_ptr())
    main.add_(1)
    policy.copy_to_model(main, model)
    assert torch.equal(model, main.to(LOW))
