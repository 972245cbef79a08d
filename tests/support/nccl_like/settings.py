"""What the tests choose: times, garbage, and errors of the NCCL-like device."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

VARIABLE = "RAYZERO_TEST_NCCL_LIKE"


@dataclass(frozen=True)
class NcclLike:
    """Times in seconds.

    Attributes:
        seed: of garbage, and of which rank sees an error.
        abort_s: how long an abort takes; collectives end halfway.
        garbage: what aborted collectives leave: "nan", "plausible", "random", or "any" of them.
        late_error_s: after a peer was lost, launches fail from then on; None: never.
        watchdog_s: from a peer's loss until torch's watchdog sees it.
        init_s: how long a group takes to be made, besides the wait for its ranks.
        dump_s: from there until it ends the process, if the environment does not say otherwise.
    """

    seed: int = 0
    abort_s: float = 0.05
    garbage: str = "any"
    late_error_s: float | None = None
    watchdog_s: float = 0.2
    dump_s: float = 3.0
    init_s: float = 0.0

    def text(self) -> str:
        return json.dumps(asdict(self))


def from_environment() -> NcclLike | None:
    """The settings that a test has put into the environment of its workers."""
    text = os.environ.get(VARIABLE)
    return NcclLike(**json.loads(text)) if text else None
