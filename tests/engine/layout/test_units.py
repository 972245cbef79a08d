"""Units: parameters that are gathered and reduced together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rayzero.engine.errors import ConfigError
from rayzero.engine.layout.units import (
    UnitPlan,
    find_large_modules,
    name_params,
    plan_blocks,
    plan_buckets,
)


def groups_of(model: nn.Module) -> dict[nn.Parameter, int]:
    return {param: 0 for param in model.parameters() if param.requires_grad}


def buckets(model: nn.Module, numel: int) -> list[UnitPlan]:
    return plan_buckets(name_params(model, groups_of(model)), numel, 2)


def blocks(model: nn.Module, *classes: str) -> dict[str, list[str]]:
    """Parameter names by unit."""
    plans = plan_blocks(model, name_params(model, groups_of(model)), classes, 2)
    names = dict(model.named_modules(remove_duplicate=False))
    for plan in plans:
        path = plan.layout.name.removesuffix(" (frozen)")
        assert plan.module is (model if path == "root" else names[path])
    return contents(plans)


def contents(plans: list[UnitPlan]) -> dict[str, list[str]]:
    names = {plan.layout.name: [spec.name for spec in plan.layout.params] for plan in plans}
    assert len(names) == len(plans)
    return names


class TestNames:
    def test_in_registration_order_with_the_first_name_of_a_tied_parameter(self) -> None:
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, bias=False)})
        model["b"].weight = model["a"].weight
        model["a"].bias.requires_grad_(False)
        named = name_params(model, {model["a"].weight: 3})
        assert [(param.name, param.group) for param in named] == [("a.weight", 3), ("a.bias", None)]


class TestBuckets:
    @given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 100))
    def test_are_filled_in_reverse_order(self, sizes: list[int], limit: int) -> None:
        model = nn.ParameterList(torch.zeros(size) for size in sizes)
        plans = buckets(model, limit)
        order = [int(spec.name) for plan in plans for spec in plan.layout.params]
        assert order == list(reversed(range(len(sizes))))
        totals = [plan.layout.logical_numel for plan in plans]
        assert all(
            total <= limit or len(plan.params) == 1
            for total, plan in zip(totals, plans, strict=True)
        )
        following = [plan.params[0].numel() for plan in plans[1:]]
        # No bucket has room for the first parameter of the next.
        assert all(total + more > limit for total, more in zip(totals[:-1], following, strict=True))

    def test_exclude_frozen_parameters(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 3))
        assert contents(buckets(model, 100)) == {"bucket0": ["1.bias", "1.weight"]}

    def test_hold_one_dtype_each(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2))
        assert contents(buckets(model, 100)) == {
            "bucket0": ["2.bias", "2.weight", "0.bias", "0.weight"],
            "bucket1": ["1.bias", "1.weight"],
        }
        assert all(len({param.dtype for param in plan.params}) == 1 for plan in buckets(model, 4))

    def test_params_are_in_layout_order(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        groups = {param: number % 2 for number, param in enumerate(model.parameters())}
        (plan,) = plan_buckets(name_params(model, groups), 100, 2)
        by_name = dict(model.named_parameters())
        names = [spec.name for spec in plan.layout.params]
        assert names == ["1.weight", "0.weight", "1.bias", "0.bias"]
        assert all(a is by_name[name] for a, name in zip(plan.params, names, strict=True))
        assert plan.module is None
        assert plan.trainable


class Pair(nn.Module):
    def __init__(self, other: nn.Module | None = None) -> None:
        super().__init__()
        self.own = nn.Linear(2, 2, bias=False)
        self.other = nn.Linear(2, 2, bias=False) if other is None else other


class TestBlocks:
    def test_elements_of_a_module_list_and_the_rest_in_the_root(self) -> None:
        model = nn.Module()
        model.first = nn.Linear(2, 2, bias=False)
        model.layers = nn.ModuleList([Pair(), Pair()])
        assert blocks(model) == {
            "root": ["first.weight"],
            "layers.0": ["layers.0.own.weight", "layers.0.other.weight"],
            "layers.1": ["layers.1.own.weight", "layers.1.other.weight"],
        }

    def test_elements_of_a_sequential_that_have_parameters(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))
        assert blocks(model) == {"0": ["0.weight"], "2": ["2.weight"]}

    def test_elements_of_a_nested_module_list_are_blocks(self) -> None:
        outer = Pair()
        outer.branches = nn.ModuleList([Pair()])
        model = nn.Module()
        model.layers = nn.ModuleList([outer])
        units = blocks(model)
        assert list(units) == ["layers.0", "layers.0.branches.0"]
        assert units["layers.0"] == ["layers.0.own.weight", "layers.0.other.weight"]

    def test_containers_are_not_blocks_but_their_elements_may_be(self) -> None:
        lists = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2, bias=False)])])
        assert list(blocks(lists)) == ["0.0"]
        # Elements of a dict are not called in sequence: they belong to the enclosing block.
        both = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ModuleList([nn.Linear(2, 2)])})
        assert list(blocks(both)) == ["root", "b.0"]

    def test_parameters_tied_between_blocks_belong_to_their_ancestor(self) -> None:
        model = nn.Module()
        model.layers = nn.ModuleList([Pair(), Pair()])
        model.layers[1].own.weight = model.layers[0].own.weight
        model.layers[0].other.weight = model.layers[0].own.weight
        units = blocks(model)
        assert units == {"root": ["layers.0.own.weight"], "layers.1": ["layers.1.other.weight"]}

    def test_parameters_tied_within_a_block_stay_there(self) -> None:
        model = nn.Module()
        model.layers = nn.ModuleList([Pair(), Pair()])
        model.layers[0].other.weight = model.layers[0].own.weight
        assert blocks(model)["layers.0"] == ["layers.0.own.weight"]

    def test_tied_parameters_belong_to_the_innermost_ancestor(self) -> None:
        outer = Pair()
        outer.experts = nn.ModuleList([Pair(), Pair()])
        outer.experts[1].own.weight = outer.experts[0].own.weight
        model = nn.Module()
        model.layers = nn.ModuleList([outer])
        assert "layers.0.experts.0.own.weight" in blocks(model)["layers.0"]

    def test_shared_module_belongs_to_the_common_ancestor(self) -> None:
        shared = nn.Linear(2, 2, bias=False)
        model = nn.Module()
        model.layers = nn.ModuleList([Pair(shared), Pair(shared)])
        assert blocks(model) == {
            "root": ["layers.0.other.weight"],
            "layers.0": ["layers.0.own.weight"],
            "layers.1": ["layers.1.own.weight"],
        }

    def test_repeated_block_is_a_single_block(self) -> None:
        block = Pair()
        model = nn.Module()
        model.layers = nn.ModuleList([block, block])
        model.repeated = nn.ModuleList([block])
        assert list(blocks(model)) == ["layers.0"]
        model.callers = nn.ModuleList([Pair(block), Pair(block)])
        assert list(blocks(model)) == ["layers.0", "callers.0", "callers.1"]

    def test_blocks_have_units_by_dtype_and_trainability(self) -> None:
        model = nn.Module()
        model.layers = nn.ModuleList([Pair()])
        model.layers[0].own.requires_grad_(False)
        model.layers[0].third = nn.Linear(2, 2, bias=False).double()
        plans = plan_blocks(model, name_params(model, groups_of(model)), (), 2)
        assert {plan.module for plan in plans} == {model.layers[0]}
        units = {(plan.trainable, plan.params[0].dtype): plan.layout.name for plan in plans}
        assert units == {
            (False, torch.float32): "layers.0 (torch.float32) (frozen)",
            (True, torch.float32): "layers.0 (torch.float32)",
            (True, torch.float64): "layers.0 (torch.float64)",
        }

    def test_classes_select_blocks(self) -> None:
        model = nn.Module()
        model.layers = nn.ModuleList([Pair(), Pair()])
        model.single = Pair()
        assert list(blocks(model, "Pair")) == ["layers.0", "layers.1", "single"]
        assert list(blocks(nn.Sequential(Pair()), "Linear")) == ["0.own", "0.other"]
        # The root is always a block, and only once.
        assert list(blocks(Pair(), "Pair")) == ["root"]

    @pytest.mark.parametrize(("numel", "large"), [(0, []), (6, ["alone"]), (7, [])])
    def test_large_modules_are_outside_of_blocks(self, numel: int, large: list[str]) -> None:
        model = nn.Module()
        model.layers = nn.ModuleList([Pair(nn.Linear(3, 3))])
        model.alone = nn.Linear(3, 2, bias=False)
        model.tied, model.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        model.head.weight = model.tied.weight
        found = find_large_modules(model, (), numel)
        assert [name for name, it in model.named_modules() if it in found] == large

    def test_unknown_class_suggests_the_closest_name(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        with pytest.raises(
            ConfigError, match=r"unshard_modules.*'Liner' \(did you mean 'Linear'\?\)"
        ):
            blocks(model, "Liner")

    @pytest.mark.parametrize("classes", [(), ("Pair",), ("Linear",), ("Pair", "Linear")])
    def test_every_parameter_belongs_to_exactly_one_unit(self, classes: tuple[str, ...]) -> None:
        model = nn.Sequential(Pair(), Pair(nn.Sequential(Pair(), nn.Linear(3, 1))))
        units = [name for unit in blocks(model, *classes).values() for name in unit]
        assert sorted(units) == sorted(name for name, _ in model.named_parameters())
