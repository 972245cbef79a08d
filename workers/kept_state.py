"""Which of the last engine's state the next engine of this process starts from.

While the next engine is built and loaded, what is kept lies beside it. So the peak is an engine and
its main weights, if the shards are cut as before, otherwise an engine and what is kept of the last
one; it is checked on the device, and in host memory that two engines fit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rayzero.engine.device import Device
from rayzero.engine.state.ranges import StateRange
from rayzero.workers.messages import Assignment, InProcessStateInfo
from rayzero.workers.vault.records import Restore

if TYPE_CHECKING:
    from rayzero.engine.engine import Engine

log = logging.getLogger("rayzero.workers")

SPARE_BYTES = 2 * 2**30
"""Of a device, for what is allocated beside torch: communicators, workspaces of kernels."""


def select_kept(
    engine: Engine,
    left: InProcessStateInfo | None,
    before: Assignment | None,
    restore: Restore | None,
) -> list[StateRange]:
    """What the engine of generation `before` holds of the state to restore."""
    return engine.state.private_ranges() if holds_state(engine, left, before, restore) else []


def holds_state(
    engine: Engine,
    left: InProcessStateInfo | None,
    before: Assignment | None,
    restore: Restore | None,
) -> bool:
    """Whether the engine of generation `before` holds its part of the state to restore. `left`: the
    state that it left behind; None if that is inconsistent, or was not looked at when it left."""
    if before is None or restore is None or not restore.slots:
        return False
    if left is None:
        _report("it was left within an update")
    elif left.step != restore.step:
        _report(f"it is of step {left.step}, restored is {restore.step}")
    elif engine.state.altered:
        _report("the training function has changed it since the last update")
    elif not _is_same_version(restore, before):
        _report(f"step {left.step} is restored from another generation")
    else:
        return True
    return False


def _is_same_version(restore: Restore, before: Assignment) -> bool:
    """Whether generation `before` made the state, or started from it: a step that is done again by
    others may differ in rounding."""
    generations = {before.generation}
    if before.restore is not None and before.restore.step == restore.step:
        generations |= {slot.generation for slot in before.restore.slots}
    return {slot.generation for slot in restore.slots} <= generations


def select_fitting(
    kept: list[StateRange],
    device: Device,
    before: tuple[int, int] | None,
    *,
    two_fit: bool,
    growth: float,
) -> list[StateRange]:
    """What of `kept` the next engine fits beside: all of it; without frozen weights, which may be
    most of it; or nothing.

    Args:
        before: the device's `memory_info` with all of the last engine.
        two_fit: two engines fit in host memory.
        growth: of the shards; if it is 1, optimizer state is moved.
    """
    if not two_fit and not all(_is_apart(it, device) for it in kept):
        return _report("two engines may not fit in host memory")
    trained = [it for it in kept if not it.constant]
    now, held = device.memory_info(), _device_bytes(kept, device)
    if not held:
        return kept
    if before is None or now is None:
        return _report(f"the memory of {device.name} is not known")
    free = now[0] + held  # with nothing kept
    engine = growth * (before[1] - now[1] + held)
    needed = 0.0
    for ranges in (kept, trained):
        moved = [it for it in ranges if it.is_optimizer_state] if growth == 1 else []
        needed = engine + _device_bytes(ranges, device) - _device_bytes(moved, device)
        if needed + SPARE_BYTES <= free:
            if ranges is not kept:
                log.info("frozen weights are read from the vaults: there is no room for both")
            return ranges
    return _report(f"the next one needs {needed:.0f} bytes of the {free} free on {device.name}")


def _is_apart(part: StateRange, device: Device) -> bool:
    """Whether it is in memory that only the device has."""
    return device.separate_memory and device.owns(part.memory)


def _device_bytes(parts: Sequence[StateRange], device: Device) -> int:
    return sum(it.memory.nbytes for it in parts if _is_apart(it, device))


def _report(reason: str) -> list[StateRange]:
    log.info("the state is read from the vaults, not taken from the last engine: %s", reason)
    return []
