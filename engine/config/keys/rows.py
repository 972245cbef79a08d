"""What a row of the table is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """What becomes of a key."""

    IMPLEMENTED = "implemented"
    NO_OP = "no-op"
    REFUSED = "refused"


IMPLEMENTED, NO_OP, REFUSED = Status.IMPLEMENTED, Status.NO_OP, Status.REFUSED
NOT_YET = "it is not in this version yet"


@dataclass(frozen=True)
class Key:
    """One key.

    A refused key may stand in a config with the value that asks for nothing: its default, null or
    false; in a section with `enabled: false`, any value.

    Attributes:
        path: with dots, from the top of the config.
        status: what becomes of it. To change it is all that landing a feature takes here.
        what: what the key asks for.
        why: why it does nothing, or why it is refused.
        use: what to use instead of a refused key.
    """

    path: str
    status: Status
    what: str
    why: str = ""
    use: str = ""

    @property
    def reason(self) -> str:
        """Why it does nothing or is refused; empty for an implemented key."""
        if self.status is IMPLEMENTED:
            return ""
        return self.why or NOT_YET
