"""Whether the optimizer state of a saved training state fits the optimizer that is to load it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.checkpoint.errors import CheckpointMismatchError
from rayzero.engine.layout.state_index import StateSource
from rayzero.engine.optim.sharded_optimizer import ShardedOptimizer
from rayzero.engine.optim.whole_params import NeedsWholeParams, WholeParamOps
from rayzero.engine.state.metadata import KERNEL_OPTIONS

_PROBE_SHAPE = (2, 2)  # a matrix, which some optimizers need


def find_other_state(optimizer: ShardedOptimizer, source: StateSource) -> str:
    """Describes what is left out of the saved state, as that of another optimizer; empty if nothing
    is. The same on every rank. Raises CheckpointMismatchError where the config does not allow
    that."""
    groups = optimizer.torch_optimizer.param_groups
    saved = _saved_keys(source)
    if not saved or not groups or _has_same_options(groups, source.metadata(0).get("groups")):
        return ""
    kept = _kept_keys(optimizer.torch_optimizer)
    if kept is None or kept == saved:
        return ""
    name = type(optimizer.torch_optimizer).__name__
    saved_list, kept_list = (", ".join(sorted(keys)) for keys in (saved, kept))
    seen = (
        f"the saved optimizer state has {saved_list} for each weight, and {name} keeps "
        f"{kept_list or 'none'}"
    )
    if optimizer.resets_other_state:
        return seen
    raise CheckpointMismatchError(
        seen,
        allowed="the optimizer that the state was saved with, or another one with the same state",
        fix='optimizer in the engine config; to leave the saved state out: "rayzero": '
        '{"other_optimizer_state": "reset"}, or load_checkpoint(load_optimizer_states=False)',
    )


def _saved_keys(source: StateSource) -> set[str]:
    names = (name for index in source.block_indexes for name in index.tensors)
    kinds = {name.partition("/")[0] for name in names}
    return {it.removeprefix("optimizer.") for it in kinds if it.startswith("optimizer.")}


def _has_same_options(groups: Iterable[Mapping[str, Any]], saved: Any) -> bool:
    """Whether the saved groups have the options of these groups, switched on and off alike: then
    the state has the same parts, whose number may grow during training."""
    documents = [dict(it.get("options", {})) for it in saved or ()]
    return all(_switches(group) in map(_switches, documents) for group in groups)


def _switches(options: Mapping[str, Any]) -> dict[str, bool]:
    """Options with numbers, such as momentum, are switches too: without it there is no state."""
    left_out = {*KERNEL_OPTIONS, "params", "lr", "initial_lr", "weight_decay"}
    return {
        key: bool(value)
        for key, value in options.items()
        if key not in left_out and isinstance(value, bool | int | float | list | tuple)
    }


def _kept_keys(optimizer: torch.optim.Optimizer) -> set[str] | None:
    """The parts of the state that the optimizer keeps for each weight, found by a step of a copy
    on four numbers a group; None if it cannot step them."""
    weights = [nn.Parameter(torch.ones(_PROBE_SHAPE)) for _ in optimizer.param_groups]
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.pop("step", None)  # a scheduler's, of the original
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    copy.__dict__.update({name: OrderedDict() for name in hooks})
    copy.state = defaultdict(dict)
    kernels = {key: False if key in ("foreach", "capturable") else None for key in KERNEL_OPTIONS}
    kernels["differentiable"] = False
    copy.param_groups = [
        {**group, **{key: kernels[key] for key in kernels if key in group}, "params": [weight]}
        for group, weight in zip(optimizer.param_groups, weights, strict=True)
    ]
    for weight in weights:
        weight.grad = torch.ones(_PROBE_SHAPE)
    try:
        if isinstance(copy, NeedsWholeParams):
            copy.bind_whole_params(WholeParamOps.of_optimizer(copy))
        type(optimizer).step(copy)
    except Exception:  # noqa: BLE001  # an optimizer of the user's own, with needs of its own
        return None
    return {
        key
        for weight in weights
        for key, value in copy.state[weight].items()
        if isinstance(value, Tensor) and value.shape == weight.shape
    }
