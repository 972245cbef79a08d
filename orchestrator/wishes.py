"""What somebody may want of a running job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Scale:
    """Between `least` and `most` workers from now on."""

    least: int
    most: int


@dataclass(frozen=True)
class Inject:
    """These faults, in the fault language; the step may be left out."""

    faults: tuple[str, ...]


Wish: TypeAlias = Scale | Inject
