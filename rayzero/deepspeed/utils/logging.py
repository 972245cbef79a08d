"""`deepspeed.utils.logging`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rayzero.deepspeed.comm import get_rank

logger = logging.getLogger("DeepSpeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on these ranks; on all of them for None, an empty list, or one with -1."""
    rank = get_rank()
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)
