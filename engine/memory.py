"""The bytes a rank holds between two steps, by class. Per parameter, W ranks, AdamW:

| stage | fp32 | bf16 with fp32 main weights |
|---|---|---|
| 0 | 4 + 4 + 8 = 16 | 2 + 4 + 4 + 8 = 18 |
| 1 | 4 + 4 + 8/W | 2 + 4 + 12/W |
| 2 | 4 + 12/W | 2 + 16/W |
| 3 | 16/W | 18/W |

and on top, bounded by a few units: slots (weights gathered, gradients in passing) and staging
(parts received from other ranks).
"""

from __future__ import annotations

from torch import Tensor

from rayzero.engine.zero.runtime import ZeroRuntime


def resting_bytes(runtime: ZeroRuntime, optimizer_state_bytes: int) -> dict[str, int]:
    """Bytes by class; memory that has two uses is counted once, as model weights.

    Classes: model_weights, main_weights (0 where they are the model weights), main_grads,
    optimizer_state, error_feedback (0 without it), slots, staging.
    """
    weights = [unit.weights.resting for unit in runtime.units] + runtime.loose
    known = {_address(one) for one in weights}
    main = [unit.main for unit in runtime.units if unit.main is not None]
    grads = [unit.grads.resting for unit in runtime.units if unit.grads is not None]
    slots = runtime.grad_slots.buffers if runtime.grad_slots is not None else []
    gathered = runtime.weight_slots.total_bytes if runtime.weight_slots is not None else 0
    return {
        "model_weights": _bytes(weights),
        "main_weights": _bytes([one for one in main if _address(one) not in known]),
        "main_grads": _bytes(grads),
        "optimizer_state": optimizer_state_bytes,
        "error_feedback": sum(one.feedback.nbytes for one in runtime.way.kept),
        "slots": _bytes(slots) + gathered,
        "staging": runtime.collectives.staging_bytes + runtime.way.buffer_bytes,
    }


def _bytes(tensors: list[Tensor]) -> int:
    return sum(one.nbytes for one in tensors)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
