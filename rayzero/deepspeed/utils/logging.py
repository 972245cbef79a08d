"""`deepspeed.utils.logging`. What it says is printed from INFO on, as in DeepSpeed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from rayzero.deepspeed.comm import get_rank


def make_stderr_logger(name: str) -> logging.Logger:
    """A logger whose messages go to stderr, unless somebody has given it a handler already."""
    found = logging.getLogger(name)
    if not found.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        found.addHandler(handler)
        found.setLevel(logging.INFO)
        found.propagate = False  # a root logger that prints too would print it twice
    return found


logger = make_stderr_logger("DeepSpeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on these ranks; on all of them for None, an empty list, or one with -1."""
    rank = get_rank()
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)
