from __future__ import annotations

from typing import Any

import pytest
import torch

from rayzero.engine.errors import ConfigError, EngineError
from rayzero.workers.context import Context, Wire
from rayzero.workers.interrupt import Interrupted
from rayzero.workers.messages import Message, Report
from tests.workers.support import ASSIGN, setup


def context(**changes: Any) -> tuple[Context, Wire, list[Message]]:
    posted: list[Message] = []
    wire = Wire(posted.append)
    return Context(setup(**changes), ASSIGN, torch.device("cpu"), wire), wire, posted


def report_of(posted: list[Message]) -> Report:
    (report,) = posted
    assert isinstance(report, Report)
    return report


def test_it_knows_the_job_and_its_place():
    ctx, _, _ = context()
    assert (ctx.rank, ctx.world_size, ctx.is_main, ctx.local_rank) == (0, 1, True, 0)
    assert (ctx.name, ctx.seed, ctx.steps, ctx.args) == ("job", 3, 5, {"width": 8})
    assert ctx.generation == 1


def test_asking_for_steps_the_job_does_not_set_says_which_key_is_missing():
    ctx, _, _ = context(steps=None)
    with pytest.raises(ConfigError, match="`steps:` in the job file"):
        _ = ctx.steps


def test_without_an_engine_report_finishes_the_step():
    ctx, wire, posted = context()
    ctx.report(tokens=10, loss=3.0)
    ctx.report(tokens=torch.tensor(5), loss=2.0)
    assert posted == []
    ctx.report(step=1, accuracy=0.5)
    report = report_of(posted)
    assert (report.generation, report.rank, report.step) == (1, 0, 1)
    assert report.counters == {"tokens": 15}
    assert report.gauges.pop("step_s") >= 0
    assert report.gauges == {"loss": 2.0, "accuracy": 0.5}
    assert wire.progress.step == 2


def test_nothing_of_one_step_leaks_into_the_next():
    ctx, _, posted = context()
    ctx.report(step=1, tokens=5, loss=1.0)
    ctx.report(step=2)
    second = posted[1]
    assert isinstance(second, Report)
    assert second.counters == {}
    assert set(second.gauges) == {"step_s"}
    ctx.report(tokens=7)
    assert ctx.unreported() == {"tokens": 7}


def test_with_an_engine_the_engine_finishes_the_step():
    ctx, _, posted = context()
    ctx.engine_ready(None)  # type: ignore[arg-type]  # the context does not look at it
    ctx.report(step=99, tokens=4, loss=9.0)
    assert posted == []
    ctx.step_done({"step": 1.0, "loss": 2.0, "step_s": 0.25})
    report = report_of(posted)
    assert report.step == 1
    assert report.gauges == {"loss": 2.0, "step_s": 0.25}
    assert report.counters == {"tokens": 4}


@pytest.mark.parametrize("value", ["many", None, torch.zeros(2), [1]])
def test_a_value_that_is_no_number_is_named(value: Any):
    ctx, _, _ = context()
    with pytest.raises(EngineError, match=r"ctx\.report\(loss="):
        ctx.report(loss=value)


@pytest.mark.parametrize("step", [0, 1])
def test_steps_must_grow_from_one(step: int):
    ctx, _, _ = context()
    ctx.report(step=1)
    with pytest.raises(EngineError, match="after step 1"):
        ctx.report(step=step)


def test_an_interrupt_is_raised_at_the_next_report_phase_or_step():
    ctx, wire, posted = context()
    ctx.phase("forward")
    wire.interrupt.request()
    for act in (
        lambda: ctx.report(loss=1.0),
        lambda: ctx.phase("data"),
        lambda: ctx.step_done({"step": 1.0}),
    ):
        with pytest.raises(Interrupted):
            act()
    assert len(posted) == 1  # the step that was finished counts
