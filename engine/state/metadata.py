"""The JSON part of the state: parameter groups, scalars, schedule, random-number generators."""

from __future__ import annotations

import json
import logging
import random
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from rayzero.engine.device import get_device
from rayzero.engine.errors import CONTENT_ERRORS, DataError
from rayzero.engine.layout.state_index import StateSource
from rayzero.engine.optim.schedule import Scheduler
from rayzero.engine.optim.sharded_optimizer import ShardedOptimizer
from rayzero.engine.precision.dtypes import dtype_name, scalar_from_json
from rayzero.engine.zero.runtime import ZeroRuntime

log = logging.getLogger("rayzero.engine")

# Options that select a kernel and do not change the result: never restored.
KERNEL_OPTIONS = {"fused", "foreach", "capturable", "differentiable"}


def optimizer_metadata(optimizer: ShardedOptimizer) -> list[dict[str, Any]]:
    """Returns each parameter group's options and the scalars of its optimizer state, for `encode`.

    Scalars (`step`) are equal for all parameters of a group, so they are read from the first shard.
    A rank without a shard of a group omits `scalars`.
    """
    groups: list[dict[str, Any]] = []
    for number, options in enumerate(optimizer.torch_optimizer.param_groups):
        kept = {key: value for key, value in options.items() if key != "params" and _is_json(value)}
        groups.append({"options": kept})
        first = next((shard for shard in optimizer.shards if shard.group == number), None)
        if first is not None and (state := optimizer.torch_optimizer.state.get(first.weight)):
            groups[-1]["scalars"] = {
                key: value
                for key, value in state.items()
                if not (isinstance(value, Tensor) and value.ndim)
            }
    return groups


def restore_optimizer_metadata(
    optimizer: ShardedOptimizer, source: StateSource, *, keep_options: bool
) -> None:
    """Restores the scalars of every shard, and the groups' options. With `keep_options`, options
    such as lr keep the values of this run's config. They must be restored if there is a scheduler,
    which changes them during training."""
    ranks = range(len(source.block_indexes))
    documents = [source.metadata(rank).get("groups") or () for rank in ranks]
    for number, group in enumerate(optimizer.torch_optimizer.param_groups):
        saved = [groups[number] for groups in documents if number < len(groups)]
        scalars: dict[str, Any] = next(
            (entry["scalars"] for entry in saved if "scalars" in entry), {}
        )
        for shard in optimizer.shards:
            if scalars and shard.group == number:
                state = optimizer.torch_optimizer.state[shard.weight]
                for key, value in scalars.items():
                    state[key] = _scalar_from_json(key, value, group, shard.weight.device)
        if saved and not keep_options:
            options = saved[0]["options"]
            for key in options.keys() - KERNEL_OPTIONS:
                is_tuple = isinstance(group.get(key), tuple)  # JSON has no tuples
                group[key] = tuple(options[key]) if is_tuple else options[key]


@contextmanager
def damaged_unless_valid(part: str) -> Iterator[None]:
    """Converts errors of decoding a part of a saved state to a DataError that names the part."""
    try:
        yield
    except CONTENT_ERRORS as error:
        raise DataError(f"the {part} of the saved state is not valid: {error!r:.300}") from error


def scheduler_metadata(scheduler: Scheduler | None) -> dict[str, Any] | None:
    """Returns a scheduler's state, without the values that JSON cannot represent."""
    if scheduler is None or not hasattr(scheduler, "state_dict"):
        return None
    state = scheduler.state_dict()
    return {key: value for key, value in state.items() if _is_json(value)}


def restore_scheduler(scheduler: Scheduler | None, state: dict[str, Any] | None) -> None:
    if scheduler is None or state is None:
        return
    if hasattr(scheduler, "load_state_dict"):
        with damaged_unless_valid("scheduler"):
            scheduler.load_state_dict(state)
    else:
        name = type(scheduler).__name__
        log.warning("the scheduler %s has no load_state_dict: it starts from the beginning", name)


def name_metadata(
    model: nn.Module, runtime: ZeroRuntime
) -> tuple[dict[str, Any], dict[int, list[str]]]:
    """Returns metadata for exports: tied names and the dtypes of model weights; and the names of
    the parameters in each group."""
    first: dict[int, str] = {}
    ties = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        first_name = first.setdefault(id(param), name)
        if first_name != name:
            ties[name] = first_name
    dtypes: dict[str, str] = {}
    groups: defaultdict[int, list[str]] = defaultdict(list)
    for unit in runtime.units:
        dtype = dtype_name(unit.weights.persistent_tensor.dtype)
        for spec in unit.layout.params:
            dtypes[spec.name] = dtype
            if unit.main_weights is not None:
                groups[spec.group].append(spec.name)
    return {"ties": ties, "model_dtypes": dtypes}, groups


def encode(document: dict[str, Any]) -> bytes:
    """Encodes as JSON, in UTF-8. Reads scalar tensors, so the host waits for their device."""
    return json.dumps(document, separators=(",", ":"), default=_scalar_to_json).encode()


def _scalar_to_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": dtype_name(value.dtype), "value": get_device(value.device).read(value)[0]}
    raise TypeError(f"{type(value).__name__} in the state of an optimizer")


def _scalar_from_json(key: str, saved: Any, group: dict[str, Any], device: torch.device) -> Any:
    """Decodes a scalar of optimizer state. `step` is on the CPU unless a kernel reads it."""
    scalar = scalar_from_json(saved)
    on_cpu = key == "step" and not group.get("fused") and not group.get("capturable")
    return scalar.to(device) if isinstance(scalar, Tensor) and not on_cpu else scalar


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def capture_rng(device: torch.device) -> dict[str, Any]:
    """Returns the states of the generators of torch, the device, Python and NumPy."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "torch": _encode(torch.get_rng_state().numpy()),
        "python": [version, _encode(np.array(words, dtype=np.uint64)), gauss],
        "numpy": [str(kind), _encode(np.asarray(keys)), *rest],
    }
    if (own := get_device(device).rng_state()) is not None:
        states["cuda"] = _encode(own.numpy())
    return states


def restore_rng(states: dict[str, Any], device: torch.device) -> None:
    """Restores the states that `capture_rng` returned. A missing device state changes nothing."""
    torch.set_rng_state(torch.from_numpy(_decode(states["torch"], np.uint8)))
    version, words, gauss = states["python"]
    random.setstate((version, tuple(_decode(words, np.uint64).tolist()), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, _decode(keys, np.uint32), *rest))
    if "cuda" in states:
        get_device(device).set_rng_state(torch.from_numpy(_decode(states["cuda"], np.uint8)))


def fork_rng(states: dict[str, Any], rank: int, device: torch.device) -> None:
    """Seeds the generators of a rank that has no saved state, from another rank's state."""
    seed = xxhash.xxh3_64_intdigest(b64decode(states["torch"]), seed=rank)
    torch.manual_seed(seed % 2**63)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    get_device(device).seed(seed % 2**63)


def _encode(array: np.ndarray[Any, Any]) -> str:
    return b64encode(array.tobytes()).decode()


def _decode(text: str, dtype: type) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(b64decode(text)), dtype=dtype)
