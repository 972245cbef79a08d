"""Moves whatever a collate function made (tensors in any nest of containers) to a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def pinned(batch: Any) -> Any:
    """`batch` with its tensors in page-locked host memory, from where copies need not block."""
    return _map(batch, torch.Tensor.pin_memory)


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with its tensors on `device`: itself on the CPU, else copied without blocking.

    The copies are queued on the current stream, so work queued after them sees them done; torch
    keeps a pinned source until its copy is.
    """
    if device.type == "cpu":
        return batch
    return _map(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _map(value: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `move` done to every tensor in mappings, lists, tuples and named tuples."""
    if isinstance(value, torch.Tensor):
        return move(value)
    if isinstance(value, Mapping):
        moved = {key: _map(item, move) for key, item in value.items()}
        return moved if type(value) is dict else type(value)(moved)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, move) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, move) for item in value)
    return value
