"""The JSON part of the state: what is not a tensor as large as the weights."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.optim.local import LocalOptimizer, Run
from rayzero.engine.optim.schedule import Scheduler
from rayzero.engine.state.parts import DTYPES, dtype_name
from rayzero.engine.state.source import StateSource
from rayzero.engine.zero.runtime import ZeroRuntime

log = logging.getLogger("rayzero.engine")

_KERNELS = {"fused", "foreach", "capturable", "differentiable"}  # how this run computes, not what


def groups_of(optimizer: LocalOptimizer) -> list[dict[str, Any]]:
    """Each parameter group's options, and the numbers its optimizer state has.

    Those are the same for all of a group's parameters (`step`), so any run tells them. A rank with
    no run of a group leaves its `scalars` out.
    """
    groups: list[dict[str, Any]] = []
    for number, options in enumerate(optimizer.torch.param_groups):
        kept = {key: one for key, one in options.items() if key != "params" and _plain(one)}
        first = next((run for run in optimizer.runs if run.group == number), None)
        state = optimizer.torch.state.get(first.weight, {}) if first is not None else {}
        scalars = {key: _scalar(value) for key, value in state.items() if _is_scalar(value)}
        groups.append({"options": kept} | ({"scalars": scalars} if state else {}))
    return groups


def put_groups(optimizer: LocalOptimizer, source: StateSource, *, keep_options: bool) -> None:
    """Gives every run its group's numbers.

    Args:
        keep_options: the groups' options, such as lr, are those of this run's config, and stay. A
            scheduler changes them as it goes; then they are taken over, unless they follow from
            the step alone.
    """
    documents = [source.small(rank) for rank in range(len(source.tables))]
    for number, group in enumerate(optimizer.torch.param_groups):
        saved = [doc["groups"][number] for doc in documents if number < len(doc.get("groups", ()))]
        scalars: dict[str, Any] = next((one["scalars"] for one in saved if "scalars" in one), {})
        for run in optimizer.runs:
            if run.group == number:
                for key, value in scalars.items():
                    optimizer.torch.state[run.weight][key] = _placed(key, value, group, run)
        if saved and not keep_options:
            options = saved[0]["options"]
            group.update({key: one for key, one in options.items() if key not in _KERNELS})


def scheduler_of(scheduler: Scheduler | None) -> dict[str, Any] | None:
    """A schedule's state, as far as JSON can hold it."""
    if scheduler is None or not hasattr(scheduler, "state_dict"):
        return None
    state = scheduler.state_dict()
    return {key: value for key, value in state.items() if _plain(value)}


def put_scheduler(scheduler: Scheduler | None, state: dict[str, Any] | None) -> None:
    if scheduler is None or state is None:
        return
    if not hasattr(scheduler, "load_state_dict"):
        log.warning("the %s has no load_state_dict: it begins anew", type(scheduler).__name__)
        return
    scheduler.load_state_dict(state)


def names_of(model: nn.Module, runtime: ZeroRuntime) -> dict[str, Any]:
    """What an export needs to know: tied names, and the dtype of each model weight."""
    first: dict[int, str] = {}
    ties = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(param), name)
        if known != name:
            ties[name] = known
    dtypes = {
        spec.name: dtype_name(unit.weights.resting.dtype)
        for unit in runtime.units
        for spec in unit.layout.params
    }
    return {"ties": ties, "model_dtypes": dtypes}


def members_of(runtime: ZeroRuntime) -> dict[int, list[str]]:
    """The names of each group's parameters."""
    members: defaultdict[int, list[str]] = defaultdict(list)
    for unit in runtime.units:
        if unit.main is not None:
            for spec in unit.layout.params:
                members[spec.group].append(spec.name)
    return members


def _is_scalar(value: Any) -> bool:
    return not (isinstance(value, Tensor) and value.ndim)


def _scalar(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": dtype_name(value.dtype), "value": value.item()}
    return value


def _placed(key: str, saved: Any, group: dict[str, Any], run: Run) -> Any:
    """A saved number as the optimizer keeps it: `step` on the CPU unless a kernel reads it."""
    if not isinstance(saved, dict):
        return saved
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    device = run.weight.device if on_device else torch.device("cpu")
    return torch.tensor(saved["value"], dtype=DTYPES[saved["dtype"]], device=device)


def _plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
