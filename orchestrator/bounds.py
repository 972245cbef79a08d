"""How many workers somebody wants: `4`, `2:4`, (2, 4)."""

from __future__ import annotations

import re

from rayzero.engine.errors import ConfigError

_TEXT = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")


def bounds(wanted: int | tuple[int, int] | str) -> tuple[int, int]:
    """The least and the most workers; a single number is both.

    Raises:
        ConfigError: it is something else, or the least is below 1 or above the most.
    """
    if isinstance(wanted, str):
        found = _TEXT.fullmatch(wanted)
        pair = (int(found[1]), int(found[2] or found[1])) if found else None
    elif isinstance(wanted, int):
        pair = (wanted, wanted)
    else:
        pair = (int(wanted[0]), int(wanted[1]))
    if pair is None or not 1 <= pair[0] <= pair[1]:
        raise ConfigError(
            f"{wanted!r} is no number of workers",
            allowed="MIN:MAX with 1 <= MIN <= MAX, such as 2:8, or one number for both",
        )
    return pair
