"""All patches of other libraries' objects: listed, composed and removed."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from rayzero.engine import patches
from rayzero.engine.api.sharded_params import add_param_attributes
from rayzero.engine.compiling import defer_dynamo_import
from rayzero.engine.patches import installed, replace, replaced, uninstall_all
from rayzero.engine.zero.deferred_init import zero_init


@pytest.fixture(autouse=True)
def nothing_installed() -> Iterator[None]:
    uninstall_all()
    yield
    uninstall_all()


def snapshot() -> dict[str, Any]:
    """Everything that `PATCHES` may replace of torch."""
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    return {
        patches.target_name(kind, name): value
        for kind in (torch.Tensor, nn.Parameter, torch.optim.Optimizer, *kinds)
        for name, value in vars(kind).items()
    }


def test_all_compose_and_are_removed():
    before = snapshot()
    defer_dynamo_import()
    add_param_attributes()
    with zero_init():
        assert torch.Tensor.is_meta is not torch._C.TensorBase.is_meta
        model = nn.Linear(2, 2)
        assert model.weight.ds_shape == (2, 2)
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert weight.to(torch.float64).tolist() == [0.0, 0.0]
    names = installed()
    defer_dynamo_import()
    add_param_attributes()
    assert installed() == names, "a second time nothing is added"
    assert len(names) == len(set(names))
    uninstall_all()
    assert snapshot() == before


def test_inherited_attribute_is_visible_again():
    with replaced(torch.Tensor, "is_meta", property(lambda _: False)):
        assert not torch.ones(1, device="meta").is_meta
    assert torch.ones(1, device="meta").is_meta
    assert "is_meta" not in vars(torch.Tensor)


def test_module_is_patched_and_restored():
    register = atexit.register
    replacement = replace(atexit, "register", print)
    assert atexit.register is print
    replacement.undo()
    assert atexit.register is register


def test_unlisted_attribute_is_refused():
    with pytest.raises(ValueError, match=r"torch\.Tensor\.sum is not in engine/patches\.py"):
        replace(torch.Tensor, "sum", None)
    assert installed() == []


@pytest.mark.parametrize(
    "target",
    [patch.target for patch in patches.PATCHES if patch.target.startswith("torch.")],
)
def test_target_exists(target: str):
    """Of torch, whose attributes it names; those of DeepSpeed's parameters must not exist."""
    *home, name = target.split(".")
    if "*" in name or name in ("all_gather", "partition", "partition_numel"):
        assert not [it for it in dir(nn.Parameter) if fnmatchcase(it, name)]
        return
    owners: list[Any] = [torch]
    for part in home[1:]:
        found = [getattr(owner, it) for owner in owners for it in dir(owner)]
        names = [it for owner in owners for it in dir(owner)]
        kinds = (type, ModuleType)
        owners = [
            it
            for it, own in zip(found, names, strict=True)
            if fnmatchcase(own, part) and isinstance(it, kinds)
        ]
    assert any(hasattr(owner, name) for owner in owners)
