"""The optimizer of an engine that only evaluates: it has no parameters and takes no step."""

from __future__ import annotations

import torch

from rayzero.engine.errors import EngineError
from rayzero.engine.optim.local import LocalOptimizer


class NoOptimizer(LocalOptimizer):
    """Stands where an optimizer would. Its state has no groups, so a checkpoint has none either."""

    def __init__(self) -> None:
        empty = torch.optim.SGD([{"params": []}], lr=0.0)  # torch refuses none at all
        empty.param_groups.clear()
        super().__init__(empty, ())

    def step(self, factor: float) -> None:
        raise no_optimizer("step")


def no_optimizer(call: str) -> EngineError:
    """What to raise when a script trains with an engine that cannot."""
    return EngineError(
        f"{call}() was called, and initialize was given no optimizer: this engine only evaluates",
        allowed="engine(...), save_16bit_model, save_checkpoint, load_checkpoint",
        fix='"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}} in the engine config, or '
        "initialize(optimizer=...)",
    )
