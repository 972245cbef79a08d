"""What a worker knows of a step beside the engine: its mirror, its process's memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rayzero.workers.mirror import Mirror

if TYPE_CHECKING:
    from rayzero.engine.engine import Engine

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Readings:
    """One generation's. Used from the training thread only. Everything here takes microseconds.

    Args:
        mirror: what of the state lies in the vault.
    """

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._skipped = 0
        self._mirrored_s = 0.0
        self._for_checkpoint = False

    def begin(self, engine: Engine) -> None:
        """The engine that the steps to come are counted from."""
        self._skipped = engine.progress.skipped_steps

    def mirrored(self, seconds: float, step: int) -> dict[str, float]:
        """The mirror of a step is over. It belongs to the time of the next one.

        Where there is a vault: replica_step, the newest step in it, and replica_bytes, what it
        holds of this rank.
        """
        self._mirrored_s = seconds
        self._for_checkpoint = self._mirror.checkpointed == step
        held = float(self._mirror.held_bytes)
        return {"replica_step": float(self._mirror.newest), "replica_bytes": held} if held else {}

    def of(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The numbers of a finished step, to be reported beside the engine's `metrics`:

        phases/mirror: out of phases/other. checkpoint_s: that, if it was for a checkpoint.
        skipped: 1 if the step changed nothing. resident_bytes, device_peak_bytes: this process's.
        """
        other_s = metrics.get("phases/other", 0.0)
        mirror_s = min(self._mirrored_s, other_s)
        found = {
            "phases/mirror": mirror_s,
            "phases/other": other_s - mirror_s,
            "checkpoint_s": mirror_s if self._for_checkpoint else 0.0,
            "resident_bytes": float(resident_bytes()),
        }
        self._mirrored_s, self._for_checkpoint = 0.0, False
        skipped = int(metrics.get("skipped_steps", self._skipped))
        found["skipped"], self._skipped = float(skipped - self._skipped), skipped
        if torch.cuda.is_initialized():
            found["device_peak_bytes"] = float(torch.cuda.max_memory_allocated())
        return found


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0
