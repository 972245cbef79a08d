"""Which checkpoints stay. A pure rule."""

from __future__ import annotations

from collections.abc import Iterable


def kept_steps(whole: Iterable[int], keep: int, keep_every: int | None = None) -> frozenset[int]:
    """The steps to keep of those whose checkpoints are whole.

    Args:
        keep: so many of the newest; at least 1.
        keep_every: besides, every step that this divides.
    """
    steps = sorted(set(whole), reverse=True)
    newest = steps[: max(1, keep)]
    return frozenset(newest) | {one for one in steps if keep_every and one % keep_every == 0}
