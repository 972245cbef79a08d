"""Stage: torch.compile by block at stage 3 and of the whole model at stages 2 and 0: whether it is
equal to eager, with how many graph breaks, how much faster.

On a CPU the graphs are traced and run uncompiled (`aot_eager`): inductor would need a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import torch
from torch._dynamo.utils import counters

from benchmarks.gpu.one_rank import Trainee, make_config, make_trainee, single_rank_group, store
from benchmarks.gpu.report import Report, Settings
from examples.gpt.model import GPT
from rayzero.engine.errors import ConfigError

STEPS, TIMED_STEPS, SMALL_TIMED_STEPS = 5, 10, 2
RTOL = 2e-2  # of bf16: fused kernels round elsewhere
SHORTEST_S = 20.0
"""A case is begun only if this much time is left."""


def run(report: Report, settings: Settings) -> None:
    backend = "inductor" if settings.on_gpu else "aot_eager"
    report.value("backend", backend)

    def by_block(model: GPT) -> None:
        for block in model.blocks:
            block.compile(backend=backend)

    def whole(model: GPT) -> None:
        model.compile(backend=backend)

    _check_refusal(report, settings, whole)
    cases: list[tuple[str, int, Callable[[GPT], None]]] = [
        ("stage 3, by block", 3, by_block),
        ("stage 2, whole model", 2, whole),
        ("stage 0, whole model", 0, whole),
    ]
    for name, stage, prepare in cases:
        if settings.on_gpu and report.left_s < SHORTEST_S:
            report.skip(name, "no time was left")
            continue
        expected, eager_s, _ = _measure(
            report, settings, f"stage {stage}, eager", stage, lambda model: None
        )
        losses, step_s, warm_graphs = _measure(report, settings, name, stage, prepare)
        close = all(abs(a - b) <= RTOL * abs(b) for a, b in zip(losses, expected, strict=True))
        report.check(f"{name}: losses", close, losses, f"{expected}, within {RTOL:g}")
        graphs = counters["stats"]["unique_graphs"]
        report.check(f"{name}: compiled", graphs >= 1, f"{graphs} graphs", "1 or more")
        more = graphs - warm_graphs
        report.check(f"{name}: no recompiles", more == 0, f"{more} after {STEPS} steps", "0")
        breaks = sum(counters["graph_break"].values())
        report.value(f"{name}: graph breaks", breaks)
        report.value(f"{name}: reasons", [text[:200] for text in counters["graph_break"]])
        report.value(f"{name}: step, ratio to eager", step_s / eager_s)
        report.value(f"{name}: graphs", graphs)
        report.check(f"{name}: no graph breaks", breaks == 0, breaks, "0")


def _check_refusal(report: Report, settings: Settings, whole: Callable[[GPT], None]) -> None:
    """At stage 3 a whole model would be traced once, with weights that are not there."""
    name = "stage 3, whole model is refused"
    with single_rank_group(store(settings, name)):
        try:
            trainee = make_trainee(settings, make_config(3), whole)
            trainee.steps(1)
        except ConfigError as error:
            report.check(name, True, error, "ConfigError")
        else:
            report.check(name, False, "it trains", "ConfigError")
            trainee.engine.close()


def _measure(
    report: Report, settings: Settings, name: str, stage: int, prepare: Callable[[GPT], None]
) -> tuple[list[float], float, int]:
    """Losses of the first steps, seconds of a later one, and graphs compiled before it."""
    torch._dynamo.reset()
    counters.clear()
    with single_rank_group(store(settings, name)):
        trainee = make_trainee(settings, make_config(stage), prepare)
        started_s = monotonic()
        losses = trainee.steps(STEPS)
        report.value(f"{name}: first {STEPS} steps_s", monotonic() - started_s)
        graphs = counters["stats"]["unique_graphs"]
        step_s = _step_s(trainee, SMALL_TIMED_STEPS if settings.small else TIMED_STEPS)
        report.value(f"{name}: step_ms", 1e3 * step_s)
        trainee.engine.close()
    return losses, step_s, graphs


def _step_s(trainee: Trainee, steps: int) -> float:
    started_s = monotonic()
    for _ in range(steps):
        loss = trainee.step()
    loss.item()
    return (monotonic() - started_s) / steps
