"""How a process behaves that is a job's controller and nothing else."""

from __future__ import annotations

import gc
import sys

_GC_THRESHOLD = 50_000


_SWITCH_INTERVAL_S = 0.001


def tune_gc_and_switch_interval() -> None:
    """To be called once all is imported.

    Garbage: messages go without the collector's help, since they are in no cycles. At Python's own
    thresholds it looks through all modules and all that is known of a job again and again, which
    took a fifth of a large job's controller.

    Threads: a scrape renders thousands of series in a thread of its own; at Python's own interval
    the event loop would wait 5 ms for its turn, every time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 20)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
