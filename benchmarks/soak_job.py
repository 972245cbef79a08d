"""The training function of the soak test, in float64, and its plain torch reference."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import soak_streams
from benchmarks.soak_control import RankState, SoakControl, parse_disruption
from rayzero.engine.data.sample_ledger import Order
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FaultFired, parse_fault
from rayzero.workers.context import Context

SAMPLES, LENGTH = 12, 50  # per step, per epoch: epochs end within a step
SHORT_PAUSE_S, PAUSE_S, LONG_PAUSE_S = 0.02, 0.2, 1.0
TAIL = 30
"""Final steps, which wait longer for pending faults."""
LEARNING_RATE = 1e-2
LONG_CALL_S = 2.5
"""Below the least learned limit of a hang, and over a hundred usual steps."""
SWALLOW_PAUSE_S = 0.1
SLOWLY, SLOW_PAUSE_S = "slowly", 2.0
"""A request while which the job must not end, and its pause: each step takes as long."""
SAVE_TIMEOUT_S = 3.0
GROUP, PROMPTS = 3, list(range(7))
"""Of a job with rollouts."""


class Points:
    """Regression samples; each is a pure function of its index."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=generator, dtype=torch.float64)
        return x, x.sum().reshape(1).sin()


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = (nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 1))
    return nn.Sequential(*layers).double()


def engine_config(stage: int, micro_batch: int, loader: dict[str, int]) -> dict[str, Any]:
    return {
        "rayzero": {"loader": loader},
        "gradient_clipping": 0,
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": micro_batch,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 200},
    }


def train(ctx: Context) -> None:
    """Train for `ctx.steps` steps and save the weights to `weights.pt`.

    Slows down while workers are missing, and while a fault is due: it may target a rank that has
    yet to join, or wait until the last one is repaired.
    """
    control = SoakControl.from_environment()
    if not control.has_reported():
        control.die_if_requested("joining")
    model, has_rollouts = make_model(ctx.seed), ctx.args["rollouts"]
    data: Any = None if has_rollouts else Points()
    if ctx.args["stream"]:
        given = ctx.args["stream"]
        data = soak_streams.open_stream(
            given["kind"], Path(given["folder"]), has_bad=given["has_bad"]
        )
    engine, _, loader, _ = ctx.initialize(model=model, training_data=data)
    loader = ctx.rollouts(PROMPTS, engine) if has_rollouts else loader
    swallows = False
    for x, y in loader.until(ctx.steps):
        step = engine.progress.step
        control.report(RankState(ctx.rank, os.getpid(), step, ctx.world_size))
        if engine.progress.micro_step == 0:
            is_slow = control.requested(SLOWLY) is not None
            time.sleep(SLOW_PAUSE_S if is_slow else _pause_s(ctx, step))
            _maybe_stay_long(control, step)
        swallows = swallows or control.take(f"swallow-{os.getpid()}")
        try:
            engine.backward(nn.functional.mse_loss(engine(x), y))
            engine.step()
        except BaseException:
            if not swallows:
                raise
            _swallow(lambda: engine(x))  # noqa: B023  # it does not return
    weights = engine.state_dict()
    if ctx.is_main:
        _save(weights, ctx.output_dir / "weights.pt")


def _maybe_stay_long(control: SoakControl, step: int) -> None:
    """One long call, of all ranks in the same step."""
    if control.requested("long_step") == str(step):
        control.mark(f"long_step-{step}")
        time.sleep(LONG_CALL_S)


def _swallow(call: Callable[[], object]) -> None:
    """Does not leave, whatever a call of the engine raises."""
    while True:
        with suppress(BaseException):
            call()
        time.sleep(SWALLOW_PAUSE_S)


def _save(weights: dict[str, Tensor], path: Path) -> None:
    """Waits for a folder that cannot be written for a moment."""
    deadline_s = time.monotonic() + SAVE_TIMEOUT_S
    while True:
        try:
            torch.save(weights, path)
            return
        except (OSError, RuntimeError):
            if time.monotonic() > deadline_s:
                raise
            time.sleep(SHORT_PAUSE_S)


def _pause_s(ctx: Context, step: int) -> float:
    unfired = unfired_faults(ctx.args["faults"], str(ctx.output_dir))
    due = [text for text in unfired if _step_of(text) <= step]
    if due and ctx.steps - step <= TAIL:
        return LONG_PAUSE_S
    is_complete = ctx.world_size == ctx.args["world_size"]
    is_awaited = any(parse_disruption(text) is not None for text in due)
    if is_complete and not is_awaited:
        return SHORT_PAUSE_S
    return min(PAUSE_S * max(1, len(due)), LONG_PAUSE_S)  # or the steps end before they can fire


def _step_of(text: str) -> int:
    parsed = parse_disruption(text)
    return parsed[1] if parsed else parse_fault(text).step


def read_fired(output_dir: str, control: SoakControl | None = None) -> list[FaultFired]:
    """The faults of both sorts that have taken effect."""
    control = control or SoakControl.from_environment()
    return [*FaultRecord(output_dir).read(), *control.record.read()]


def unfired_faults(
    faults: list[str], output_dir: str, control: SoakControl | None = None
) -> list[str]:
    """Faults that fired fewer times than specified."""
    fired = [event.fault for event in read_fired(output_dir, control)]
    return [text for text in faults if fired.count(text) < _total_firings(text)]


def _total_firings(text: str) -> int:
    return 1 if parse_disruption(text) else parse_fault(text).total_firings


def batches_in_order(steps: int, order: Order) -> list[list[int]]:
    """The samples of each step."""
    return [order.indices(step * SAMPLES, SAMPLES).tolist() for step in range(steps)]


def train_reference(
    batches: Iterable[list[int]],
    seed: int,
    data: Sequence[soak_streams.Sample] | Mapping[int, soak_streams.Sample] | Points | None = None,
    left_out: Collection[int] = (),
) -> Iterator[dict[str, Tensor]]:
    """The weights after each step, trained by plain torch on these samples, as if the loss of those
    that are left out were 0. They change with the next step."""
    model = make_model(seed)
    data = Points() if data is None else data
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for batch in batches:
        good = [data[it] for it in batch if it not in left_out]
        x, y = (torch.stack(part) for part in zip(*good, strict=True))
        optimizer.zero_grad()
        (nn.functional.mse_loss(model(x), y) * (len(good) / len(batch))).backward()
        optimizer.step()
        yield {name: value.detach() for name, value in model.state_dict().items()}
