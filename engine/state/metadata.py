"""The JSON part of the state: parameter groups, scalars, schedule, random-number generators."""

from __future__ import annotations

import json
import logging
import random
from base64 import b64decode, b64encode
from collections import defaultdict
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from rayzero.engine.layout.state_index import StateSource
from rayzero.engine.optim.schedule import Scheduler
from rayzero.engine.optim.sharded_optimizer import OptimizerShard, ShardedOptimizer
from rayzero.engine.precision.dtypes import DTYPE_BY_NAME, dtype_name
from rayzero.engine.zero.runtime import ZeroRuntime

log = logging.getLogger("rayzero.engine")

# Options that select a kernel and do not change the result: never restored.
_KERNEL_OPTIONS = {"fused", "foreach", "capturable", "differentiable"}


def optimizer_metadata(optimizer: ShardedOptimizer) -> list[dict[str, Any]]:
    """Each parameter group's options and the scalars of its optimizer state.

    Scalars (`step`) are equal for all parameters of a group, so they are read from the first shard.
    A rank without a shard of a group omits `scalars`.
    """
    groups: list[dict[str, Any]] = []
    for number, options in enumerate(optimizer.torch_optimizer.param_groups):
        kept = {key: value for key, value in options.items() if key != "params" and _is_json(value)}
        first = next((shard for shard in optimizer.shards if shard.group == number), None)
        state = optimizer.torch_optimizer.state.get(first.weight, {}) if first is not None else {}
        scalars = {key: _scalar_to_json(value) for key, value in state.items() if _is_scalar(value)}
        groups.append({"options": kept} | ({"scalars": scalars} if state else {}))
    return groups


def restore_optimizer_metadata(
    optimizer: ShardedOptimizer, source: StateSource, *, keep_options: bool
) -> None:
    """Restore the scalars of every shard, and the groups' options.

    Args:
        keep_options: keep the groups' options, such as lr, of this run's config. With a scheduler,
            which changes them during training, they are restored.
    """
    documents = [source.metadata(rank) for rank in range(len(source.block_indexes))]
    for number, group in enumerate(optimizer.torch_optimizer.param_groups):
        saved = [doc["groups"][number] for doc in documents if number < len(doc.get("groups", ()))]
        scalars: dict[str, Any] = next(
            (group["scalars"] for group in saved if "scalars" in group), {}
        )
        for shard in optimizer.shards:
            if shard.group == number:
                for key, value in scalars.items():
                    optimizer.torch_optimizer.state[shard.weight][key] = _scalar_from_json(
                        key, value, group, shard
                    )
        if saved and not keep_options:
            options = saved[0]["options"]
            group.update({key: options[key] for key in options.keys() - _KERNEL_OPTIONS})


def scheduler_metadata(scheduler: Scheduler | None) -> dict[str, Any] | None:
    """A scheduler's state, without the values that JSON cannot represent."""
    if scheduler is None or not hasattr(scheduler, "state_dict"):
        return None
    state = scheduler.state_dict()
    return {key: value for key, value in state.items() if _is_json(value)}


def restore_scheduler(scheduler: Scheduler | None, state: dict[str, Any] | None) -> None:
    if scheduler is None or state is None:
        return
    if not hasattr(scheduler, "load_state_dict"):
        log.warning(
            "the scheduler %s has no load_state_dict and starts from its initial state",
            type(scheduler).__name__,
        )
        return
    scheduler.load_state_dict(state)


def param_name_metadata(model: nn.Module, runtime: ZeroRuntime) -> dict[str, Any]:
    """For exports: tied names, and the dtype of each model weight."""
    first: dict[int, str] = {}
    ties = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        first_name = first.setdefault(id(param), name)
        if first_name != name:
            ties[name] = first_name
    dtypes = {
        spec.name: dtype_name(unit.weights.persistent_tensor.dtype)
        for unit in runtime.units
        for spec in unit.layout.params
    }
    return {"ties": ties, "model_dtypes": dtypes}


def group_param_names(runtime: ZeroRuntime) -> dict[int, list[str]]:
    """The names of each group's parameters."""
    members: defaultdict[int, list[str]] = defaultdict(list)
    for unit in runtime.units:
        if unit.main_weights is not None:
            for spec in unit.layout.params:
                members[spec.group].append(spec.name)
    return members


def _is_scalar(value: Any) -> bool:
    return not (isinstance(value, Tensor) and value.ndim)


def _scalar_to_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": dtype_name(value.dtype), "value": value.item()}
    return value


def _scalar_from_json(key: str, saved: Any, group: dict[str, Any], shard: OptimizerShard) -> Any:
    """A saved scalar as the optimizer keeps it: `step` on the CPU unless a kernel reads it."""
    if not isinstance(saved, dict):
        return saved
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    device = shard.weight.device if on_device else torch.device("cpu")
    return torch.tensor(saved["value"], dtype=DTYPE_BY_NAME[saved["dtype"]], device=device)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def capture_rng(device: torch.device) -> dict[str, Any]:
    """States of the generators of torch, its device, Python and NumPy."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {
        "torch": _encode_bytes(torch.get_rng_state().numpy().tobytes()),
        "python": [version, _encode_bytes(np.array(words, dtype=np.uint64).tobytes()), gauss],
        "numpy": [
            str(kind),
            _encode_bytes(np.asarray(keys).tobytes()),
            position,
            has_gauss,
            cached,
        ],
    }
    if device.type == "cuda":
        states["cuda"] = _encode_bytes(torch.cuda.get_rng_state(device).numpy().tobytes())
    return states


def restore_rng(states: dict[str, Any], device: torch.device) -> None:
    """Restore generator states from `capture_rng`; a missing device state is left unchanged."""
    torch.set_rng_state(_decode_tensor(states["torch"]))
    version, words, gauss = states["python"]
    random.setstate((version, tuple(_decode_array(words, np.uint64).tolist()), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, _decode_array(keys, np.uint32), position, has_gauss, cached))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_decode_tensor(states["cuda"]), device)


def fork_rng(states: dict[str, Any], rank: int, device: torch.device) -> None:
    """Seed the generators of a rank without a saved state from another rank's state."""
    seed = xxhash.xxh3_64_intdigest(b64decode(states["torch"]), seed=rank)
    torch.manual_seed(seed % 2**63)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed % 2**63)


def _encode_bytes(raw: bytes) -> str:
    return b64encode(raw).decode()


def _decode_array(text: str, dtype: type) -> Any:
    return np.frombuffer(b64decode(text), dtype=dtype)


def _decode_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8)
