"""A training function that covers every kind of state of `tests.engine.state.kinds`.

Each kind takes two generations: the first is killed, the second finishes.
"""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

from rayzero.engine.engine import Engine
from tests.engine.state.blocks import Block
from tests.engine.state.kinds import KINDS, make_engine, train_until

STEPS, AT = 7, 5  # in the first generation of a kind, rank 1 dies within the step after `AT`


def train(ctx: Any) -> dict[str, Any]:
    """Train, and write each rank's state to a file."""
    row, is_second = divmod(ctx.generation - 1, 2)
    name = list(KINDS)[row]
    kind = KINDS[name]
    engine, loader = make_engine(kind, kind.config(kind.stage, str(ctx.output_dir)))
    if ctx.rank == 1 and not is_second:
        train_until(engine, loader, AT)
        _kill_in_phase(engine, "update" if row % 2 else "backward")
    train_until(engine, loader, STEPS)
    Path(ctx.output_dir, f"{row}-{ctx.rank}").write_bytes(pickle.dumps(Block.of(engine)))
    return {}


def _kill_in_phase(engine: Engine, phase: str) -> None:
    """Kill this process when it next enters the phase, with the mirror of the step before, which
    may be under way beside it, complete."""

    def kill(*_: Any) -> None:
        mirror: Any = engine.state.copied_by
        assert mirror is None or mirror.done.wait(60.0)
        os.kill(os.getpid(), signal.SIGKILL)

    if phase == "update":
        engine.optimizer.register_step_pre_hook(kill)
    else:
        engine.module.register_full_backward_hook(kill)
