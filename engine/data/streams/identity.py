"""Compares what the order of a stream depends on with that of a training state."""

from __future__ import annotations

from collections.abc import Mapping

from rayzero.engine.errors import DataError


def check_identity(saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises DataError if the training state was trained on a stream of another order. Both by
    the words of an error."""
    for name in [*saved, *now]:
        if saved.get(name) != now.get(name):
            raise DataError(
                f"the training state was trained on a stream with {name}: "
                f"{saved.get(name, 'none')}; now: {now.get(name, 'none')}",
                allowed="the same data, seed, windows and weights, in the same order",
                fix="restore the files or the settings, or begin a new job with the weights "
                "of this one",
            )
