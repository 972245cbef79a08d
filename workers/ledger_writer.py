"""Writes this rank's part of the sample ledger, through outages of its storage.

Rule of ordering: `ledger-first` (docs/engine.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import TypeVar

from rayzero.engine.data.sample_ledger import SampleLedger
from rayzero.engine.errors import DataError
from rayzero.workers.messages import Assignment, WorkerSpec
from rayzero.workers.training_thread import StopFlag

log = logging.getLogger("rayzero.workers")

RETRY_S = 1.0
"""Seconds between two attempts."""

T = TypeVar("T")


class LedgerWriter:
    """The ledger of one rank in one generation.

    While the ledger cannot be written, training waits, up to half as long as a rank may make no
    progress. Most outages of storage are shorter, and no step may be missing in the ledger.
    """

    def __init__(self, spec: WorkerSpec, assignment: Assignment, interrupt: StopFlag) -> None:
        """Opens the ledger. Raises DataError as `SampleLedger`."""
        self._limit_s = spec.patience_s / 2
        self._interrupt = interrupt
        folder = Path(spec.output_dir, "ledger", spec.run)
        self._ledger = self._retry(
            lambda: SampleLedger(
                folder, assignment.generation, assignment.rank, assignment.world_size
            )
        )

    def add_samples(self, samples: Sequence[int]) -> None:
        """Adds samples that the loader has yielded for the current step."""
        self._ledger.add_samples(samples)

    def add_skipped(self, samples: Sequence[int]) -> None:
        """Adds which of the current step's samples were left out of training."""
        self._ledger.add_skipped(samples)

    def write_step(self, step: int) -> None:
        """Writes the line of a step. Raises DataError after the time limit."""
        self._retry(lambda: self._ledger.write_step(step))

    def _retry(self, write: Callable[[], T]) -> T:
        is_reported = False
        until_s = monotonic() + self._limit_s
        while True:
            try:
                return write()
            except DataError as error:
                if isinstance(error.__cause__, FileExistsError) or monotonic() > until_s:
                    raise
                if not is_reported:
                    log.warning(
                        "%s\n  training waits for it, up to %g s", error.seen, self._limit_s
                    )
                is_reported = True
                self._interrupt.wait(RETRY_S)
                self._interrupt.check()
