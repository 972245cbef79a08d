"""`recovery_jobs.train`, which writes down where each rank's state was read from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rayzero.engine.engine import Engine
from tests.workers import recovery_jobs


class _File(logging.Handler):
    """Appends one line a record."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        with self.path.open("a") as file:
            file.write(record.getMessage() + "\n")


def log_to_file(ctx: Any) -> None:
    """What is selected is logged before this is called: with the last rank's."""
    log = logging.getLogger("rayzero")
    log.setLevel(logging.INFO)
    log.handlers[:] = [_File(ctx.output_dir / f"kept-{ctx.rank}")]


def train(ctx: Any) -> dict[str, Any]:
    """args: `update_fails`, generation, rank and step of an update that fails half-way."""
    log_to_file(ctx)
    generation, rank, step = ctx.args.get("update_fails", (0, 0, 0))
    initialize = ctx.initialize

    def initialize_and_fail(**kwargs: Any) -> Any:
        parts = initialize(**kwargs)
        engine: Engine = parts[0]

        def fail(*_: Any) -> None:
            member = ctx.generation, ctx.rank
            if member == (generation, rank) and engine.progress.step + 1 == step:
                engine.optimizer.state.clear()  # type: ignore[union-attr]
                (ctx.output_dir / "update-failed").touch()
                raise ValueError("within an update")

        engine.optimizer.register_step_pre_hook(fail)  # type: ignore[union-attr]
        return parts

    ctx.initialize = initialize_and_fail
    return recovery_jobs.train(ctx)
