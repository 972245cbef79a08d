"""Settings of a job's process, and its end when a later process has taken over the job."""

from __future__ import annotations

import gc
import os
import sys

_GC_THRESHOLD = 50_000
_SWITCH_INTERVAL_S = 0.001


def end_fenced_process() -> None:
    """Ends this process alone, when the agents obey a later process of the same job. An orderly end
    would also end the actor, the workers and the vaults, which belong to the later process now."""
    print("another process of this job has taken over its agents: this one ends", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)


def tune_gc_and_switch_interval() -> None:
    """Prepares a process that only runs a job's controller. Called after all imports.

    Garbage collection runs less often: messages are in no reference cycles. At Python's default
    thresholds the collector scans all modules and the state of the job so often that it took a
    fifth of the CPU time of a large job's controller.

    Threads switch more often: a scrape renders thousands of series in a thread of its own. At the
    default switch interval the event loop would wait 5 ms for the GIL each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 20)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
