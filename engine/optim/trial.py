"""Whether an optimizer can work on shards is tried out, where it cannot be known."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayzero.engine.errors import ConfigError
from rayzero.engine.optim.local import MakeOptimizer

STEPS, ROWS, COLUMNS, CUT = 3, 4, 6, 10


def check_by_trial(make: MakeOptimizer, name: str) -> None:
    """Has it train two dozen numbers, as a matrix and cut in two, and compares.

    Raises:
        ConfigError: the results differ, so it looks at more than one element at a time; or it
            fails.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(ROWS * COLUMNS, generator=generator)
    grads = [torch.randn(ROWS * COLUMNS, generator=generator) for _ in range(STEPS)]
    whole = _trained(make, [start.view(ROWS, COLUMNS)], [[g.view(ROWS, COLUMNS)] for g in grads])
    parts = _trained(make, list(start.split(CUT)), [list(g.split(CUT)) for g in grads])
    if not torch.allclose(whole, parts, rtol=1e-4, atol=1e-6):
        raise ConfigError(
            f"the optimizer {name} trains a matrix and its two halves differently, so that shards "
            "cannot use it",
            allowed="optimizers that update each element by itself",
            fix="optimizer.type in the engine config",
        )


def _trained(make: MakeOptimizer, starts: list[Tensor], grads: list[list[Tensor]]) -> Tensor:
    params = [nn.Parameter(start.clone()) for start in starts]
    optimizer = make([{"params": params}])
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return torch.cat([param.detach().reshape(-1) for param in params])
