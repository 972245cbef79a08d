"""The bytes a rank holds between two steps, by class. Per parameter, W ranks, AdamW:

| stage | fp32 | bf16 with fp32 main weights |
|---|---|---|
| 0 | 4 + 4 + 8 = 16 | 2 + 4 + 4 + 8 = 18 |
| 1 | 4 + 4 + 8/W | 2 + 4 + 12/W |
| 2 | 4 + 12/W | 2 + 16/W |
| 3 | 16/W | 18/W |

and on top, bounded by a few units: slots (weights gathered, gradients in passing) and staging
(parts received from other ranks). What is offloaded is counted apart: in host memory, or in files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from rayzero.engine.offload.place import Place
from rayzero.engine.optim.local import LocalOptimizer
from rayzero.engine.zero.runtime import ZeroRuntime


def resting_bytes(runtime: ZeroRuntime, optimizer: LocalOptimizer) -> dict[str, int]:
    """Bytes by class; memory that has two uses is counted once, as model weights.

    Classes: model_weights, main_weights (0 where they are the model weights), main_grads,
    optimizer_state, error_feedback (0 without it), second_shards (0 without
    zero_hpz_partition_size), slots, staging. What rests in host memory or in files is not among
    them, but under the same names with `host_` or `disk_` before them, where there is any.
    """
    slots = runtime.grad_slots.buffers if runtime.grad_slots is not None else []
    gathered = runtime.weight_slots.total_bytes if runtime.weight_slots is not None else 0
    way = runtime.gatherer.way if runtime.gatherer is not None else None
    found = Counter(
        model_weights=sum(one.nbytes for one in runtime.loose),
        main_weights=0,
        main_grads=0,
        optimizer_state=0,
        error_feedback=sum(one.feedback.nbytes for one in runtime.way.kept)
        + sum(one.nbytes for _, one in runtime.way.shared()),
        second_shards=way.kept_bytes if way is not None else 0,
        slots=sum(one.nbytes for one in slots) + gathered,
        staging=runtime.collectives.staging_bytes
        + runtime.way.buffer_bytes
        + (way.buffer_bytes if way is not None else 0),
    )
    for name, place, tensor in _resting(runtime, optimizer):
        found[name if place is Place.DEVICE else f"{place.value}_{name}"] += tensor.nbytes
    if runtime.offload.staging_bytes:
        found["host_staging"] = runtime.offload.staging_bytes
    return dict(found)


def _resting(
    runtime: ZeroRuntime, optimizer: LocalOptimizer
) -> Iterable[tuple[str, Place, Tensor]]:
    """All of the engine's own tensors that stay between two steps, each once."""
    for unit in runtime.units:
        yield "model_weights", unit.weights.rests, unit.weights.resting
        if unit.main is not None and _address(unit.main) != _address(unit.weights.resting):
            yield "main_weights", unit.home.place, unit.main
        if unit.grads is not None:
            for place, tensor in unit.grads.resting.items():
                yield "main_grads", place, tensor
    for run in optimizer.runs:
        for value in optimizer.torch.state.get(run.weight, {}).values():
            if isinstance(value, Tensor) and value.ndim > 0:
                yield "optimizer_state", run.unit.home.place, value


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
