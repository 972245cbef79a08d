"""A training function that goes through every kind of state, a row for each two generations; see
`tests.engine.state.kinds`.
"""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

from rayzero.engine.engine import Engine
from tests.engine.state.blocks import Block
from tests.engine.state.kinds import KINDS, go_on, make

STEPS, AT = 7, 5  # rank 1 dies within the step after `AT`, if its row is young


def train(ctx: Any) -> dict[str, Any]:
    """Leaves each rank's state in a file."""
    row, later = divmod(ctx.generation - 1, 2)
    name = list(KINDS)[row]
    kind = KINDS[name]
    engine, loader = make(kind, kind.config(kind.stage, str(ctx.output_dir)))
    if ctx.rank == 1 and not later:
        go_on(engine, loader, AT)
        _doom(engine, "update" if row % 2 else "backward")
    go_on(engine, loader, STEPS)
    Path(ctx.output_dir, f"{row}-{ctx.rank}").write_bytes(pickle.dumps(Block.of(engine)))
    return {}


def _doom(engine: Engine, phase: str) -> None:
    """This process dies when it is next in that phase."""

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if phase == "update":
        engine.optimizer.register_step_pre_hook(die)
    else:
        engine.module.register_full_backward_hook(die)
