"""Which of the last engine's state the next engine of this process starts from.

While the next engine is built and loaded, what is kept lies beside it. So the peak is an engine and
its main weights, if the shards are cut as before, otherwise an engine and what is kept of the last
one; it is checked on the device, and in host memory that two engines fit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

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
    """What the engine of generation `before` holds of the state to restore. `left`: the state that
    it left behind; None if that is inconsistent, or was not looked at after the unwind."""
    if before is None or restore is None or not restore.slots:
        return []
    if left is None:
        _report("it was left within an update")
    elif left.step != restore.step:
        _report(f"it is of step {left.step}, restored is {restore.step}")
    elif engine.state.altered:
        _report("the training function has changed it since the last update")
    elif not _is_same_version(restore, before):
        _report(f"step {left.step} is restored from another generation")
    else:
        return engine.state.updated_ranges()
    return []


def _is_same_version(restore: Restore, before: Assignment) -> bool:
    """Whether generation `before` made the state, or started from it: a step that is done again by
    others may differ in rounding."""
    generations = {before.generation}
    if before.restore is not None and before.restore.step == restore.step:
        generations |= {slot.generation for slot in before.restore.slots}
    return {slot.generation for slot in restore.slots} <= generations


def has_room(
    kept: Sequence[StateRange],
    device: Device,
    before: tuple[int, int] | None,
    *,
    two_fit: bool,
    growth: float,
) -> bool:
    """Whether the next engine fits beside what is kept of the last one.

    Args:
        before: the device's `memory_info` with all of the last engine.
        two_fit: two engines fit in host memory.
        growth: of the shards; if it is 1, optimizer state is moved.
    """
    on_device = [it for it in kept if device.separate_memory and device.owns(it.memory)]
    now = device.memory_info()
    if len(on_device) < len(kept) and not two_fit:
        return _report("two engines may not fit in host memory")
    if not on_device or before is None or now is None:
        return not on_device
    kept_bytes = sum(it.memory.nbytes for it in on_device)
    moved = sum(it.memory.nbytes for it in on_device if it.is_optimizer_state)
    needed = growth * (before[1] - now[1] + kept_bytes) - (moved if growth == 1 else 0)
    if needed + SPARE_BYTES <= now[0]:
        return True
    return _report(f"the next one needs {needed:.0f} bytes of the {now[0]} free on {device.name}")


def _report(reason: str) -> Literal[False]:
    log.info("the state is read from the vaults, not taken from the last engine: %s", reason)
    return False
