"""Slow firsts of torch, done before a worker is counted as ready."""

from __future__ import annotations

import torch


def warm_up() -> None:
    """One step of a tiny model: torch's first optimizer loads some 100 MB of modules, the first
    backward starts autograd's threads. A worker that joins a running job must not make its peers
    wait for that.
    """
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.square().sum().backward()
    optimizer.step()
