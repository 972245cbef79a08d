"""How often a process that handles thousands of messages a second looks for garbage."""

from __future__ import annotations

import gc

_YOUNG = 50_000


def collect_seldom() -> None:
    """For a process that is a controller and nothing else, once all is imported.

    Messages go without the collector's help: they are in no cycles. At Python's own thresholds it
    looks through all modules and all that is known of a job again and again, which took a fifth of
    a large job's controller.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 20, 20)
