"""Copies a job's log into the store of its checkpoints, as numbered, compressed parts.

The log file on the disk of the job's process is the buffer. What the store does not take is read
from the file again later, so that memory is bounded by one read.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence

from rayzero.engine.checkpoint.store import join_url
from rayzero.orchestrator.job.log import end_of_log, read_log
from rayzero.orchestrator.journal.parts import PartWriter
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.top.format import format_size

LOG_FOLDER = "logs"
PART_BYTES = 512 * 1024
"""Compressed size from which a part is full."""
CHUNK_BYTES = 4 * 2**20
"""How much of the log file is read and compressed at once."""
_COMPRESS_LEVEL = 1  # four times as fast as the default, for parts that are a fifth larger


class LogUpload:
    """Copies what a job's process writes into its log file from now on into parts in the store.

    Args:
        warn: emits a warning when a part of the log is missing in the store.
        fence: raises when another process owns the job's folder.

    Attributes:
        logged_bytes: number of bytes written into the log file. The writer of the file adds them.
    """

    def __init__(
        self, plan: JobPlan, warn: Callable[[str], None], fence: Callable[[], None]
    ) -> None:
        self.logged_bytes = 0
        self._path = plan.log_path
        self._max_bytes = plan.spec.records.max_bytes
        self._warn = warn
        self._fence = fence
        self._position = end_of_log(plan.log_path)
        self._copied_bytes = 0
        self._parts = PartWriter(join_url(plan.job_folder, LOG_FOLDER), ".log.gz", PART_BYTES)

    def write(self, _: Sequence[None]) -> None:
        """Copies all new content of the log file. Raises StoreError, OSError, or as `fence`. The
        next call then continues at the same place."""
        self._fence()
        while True:
            logged_bytes = self.logged_bytes  # before the read, which may return more than that
            content, position = read_log(self._path, self._position, CHUNK_BYTES)
            if not content:
                break
            self._parts.append(gzip.compress(content, _COMPRESS_LEVEL, mtime=0))
            self._position = position
            self._copied_bytes += len(content)
            self._parts.prune(self._max_bytes)
        if (lost_bytes := logged_bytes - self._copied_bytes) > 0:
            self._copied_bytes = logged_bytes
            self._warn(
                f"{format_size(lost_bytes)} of the job's log are not in the store: it did not take "
                f"them before {self._path} was rotated"
            )
