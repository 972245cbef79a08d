"""Where a term of a sum goes."""

from __future__ import annotations

from torch import Tensor


def put(out: Tensor, term: Tensor, *, add: bool) -> None:
    """`term` replaces `out`, or is added to it."""
    if add:
        out.add_(term)
    else:
        out.copy_(term)
