"""Where a loop that continues through faults is, against what has happened to its job."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from rayzero.engine.data.sampling import TrainingProgress
from rayzero.engine.errors import CollectiveError
from rayzero.workers.launch import followed_loop
from rayzero.workers.launch.followed_loop import FollowedLoop
from rayzero.workers.launch.kept_schedules import KeptSchedules, StepwiseSchedules


class Job:
    """A rank of a job whose steps end, and are lost; `waits`: of its loop, for what."""

    def __init__(self, *, step: int = 0, survivors_stay: bool = False) -> None:
        self.waits: list[str] = []
        self.progress = TrainingProgress(step=step)
        self.assignment = SimpleNamespace(generation=3, survivors_stay=survivors_stay)
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        self.schedule = lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.loop = SimpleNamespace(yields_again=True)
        session: Any = SimpleNamespace(
            assignment=self.assignment,
            loop=self.loop,
            on_phase=self.waits.append,
            steps_to_go_back=2,
        )
        await_group = SimpleNamespace(await_group=lambda: self.waits.append("group"))
        engine: Any = SimpleNamespace(progress=self.progress, survival=await_group)
        schedules = KeptSchedules()
        schedules.schedules.append(self.schedule)
        self.followed = FollowedLoop(session, engine, schedules)

    def end_step(self) -> None:
        self.optimizer.step()
        self.schedule.step()
        self.progress.finish_step(4, finite=True, bad=0)

    def go_back(self, steps: int) -> None:
        self.progress.lose_step(TrainingProgress(step=self.progress.step - steps))
        self.assignment.generation += 1

    @property
    def rate(self) -> float:
        rate: float = self.optimizer.param_groups[0]["lr"]
        return rate


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_loop, "present_ranks", lambda: (1, 2))
    monkeypatch.setattr(followed_loop.dist, "get_rank", lambda: 1)


@pytest.mark.parametrize("back", [0, 1, 2, 4])
def test_schedules_go_back_with_the_job_and_what_it_cannot_reach_is_not_kept(back: int) -> None:
    job = Job()
    for step in range(5):
        assert not job.followed.follow()
        job.followed.kept[step] = f"batches of {step}"
        job.end_step()
    if not back:
        assert not job.followed.follow()
        assert (job.followed.step, job.rate) == (5, 0.5**5)
        return
    job.go_back(back)
    assert job.followed.has_changed
    assert job.followed.follow()
    assert not job.followed.follow(), "once"
    assert (job.followed.step, job.rate) == (5 - back, 0.5 ** (5 - back))
    assert job.schedule.last_epoch == 5 - back
    assert {it for it in job.followed.kept if it >= 5 - back} == {*range(max(2, 5 - back), 5)}
    assert min(job.followed.kept) >= 5 - back - 2


def test_script_is_run_again_where_its_schedules_are_not_kept() -> None:
    job = Job(step=3)
    job.go_back(1)
    with pytest.raises(CollectiveError, match="step 2, whose schedules are not kept"):
        job.followed.follow()


def test_other_ranks_are_a_change_without_a_lost_step() -> None:
    job = Job()
    job.end_step()
    job.assignment.generation += 1
    assert job.followed.follow()
    assert (job.followed.step, job.rate) == (1, 0.5), "the step stands"


@pytest.mark.parametrize(("yields_again", "waits"), [(True, ["data", "group"]), (False, ["data"])])
def test_only_a_loop_that_reads_again_waits_for_another_group(
    yields_again: bool, waits: list[str]
) -> None:
    job = Job()
    job.loop.yields_again = yields_again
    job.followed.follow()
    assert job.waits == waits


@pytest.mark.parametrize("is_new", [True, False])
def test_new_members_get_a_survivors_state_once(
    monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    job, broken = Job(survivors_stay=is_new), [True]

    def gather(value: Any) -> list[Any]:
        if broken.pop() if broken else False:
            raise CollectiveError("the group broke")
        return ["state", value]

    monkeypatch.setattr(followed_loop, "all_gather_objects", gather)
    if not is_new:
        assert job.followed.meet("place") is None, "its own first generation"
        job.assignment.generation += 1
    assert job.followed.meet("place") is None, "the group broke"
    assert job.followed.meet("place") is None, "once a generation"
    job.assignment.generation += 1
    assert job.followed.meet("place") == ["state", (not is_new, "place")]
    assert job.followed.send(0, lambda: None) == ("state" if is_new else None)
    assert job.followed.send(0, lambda: None) is None
    assert job.followed.knows_state


def make_schedules(kind: str) -> KeptSchedules:
    """Those of a script, in the order in which it makes them; the one that it steps is last."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    kept = KeptSchedules()
    made = kept.schedules
    if kind == "exponential":
        made.append(lr_scheduler.ExponentialLR(optimizer, 0.9))
    elif kind == "plateau":
        made.append(lr_scheduler.ReduceLROnPlateau(optimizer, patience=2))
    elif kind == "sequential":
        made.append(lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5))
        made.append(lr_scheduler.CosineAnnealingLR(optimizer, 20))
        made.append(lr_scheduler.SequentialLR(optimizer, [*made], [5]))
    else:
        made.append(lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=4))
        made.append(lr_scheduler.ExponentialLR(optimizer, 0.9))
        made.append(lr_scheduler.ChainedScheduler([*made], optimizer))
    return kept


def rates_of(
    kept: KeptSchedules, steps: Iterable[int], *value: float, every: int = 1
) -> Iterator[Any]:
    """Steps as a script does: after the engine, whose state has the schedules before that; it is
    copied at each `every`-th step."""
    for step in steps:
        kept.schedules[-1].optimizer.step()
        inside = kept.plain_states() if step % every == 0 else None
        kept.schedules[-1].step(*value)
        kept.keep(step)
        yield kept.schedules[-1].optimizer.param_groups[0]["lr"], inside


@pytest.mark.parametrize("kind", ["exponential", "sequential", "chained"])
@pytest.mark.parametrize(("last", "every"), [(3, 1), (4, 1), (5, 1), (6, 3), (9, 3)])
def test_schedules_of_a_script_that_is_run_again_are_where_they_were(
    kind: str, last: int, every: int
) -> None:
    run = [*rates_of(make_schedules(kind), range(1, 13), every=every)]
    again = make_schedules(kind)
    again.catch_up(json.loads(json.dumps(run[last - 1][1])))
    rates = [rate for rate, _ in rates_of(again, range(last + 1, 13))]
    assert rates == pytest.approx([rate for rate, _ in run[last:]], rel=1e-12)


def test_values_that_no_checkpoint_has_are_named(caplog: pytest.LogCaptureFixture) -> None:
    *_, (_, inside) = rates_of(make_schedules("plateau"), range(1, 4), 1.0)
    again = make_schedules("plateau")
    again.catch_up(inside)
    assert again.schedules[0].last_epoch == 2
    assert "without the last 1 of" in caplog.text


@pytest.mark.parametrize("has_own", [False, True])
def test_only_a_script_with_schedules_is_run_again_where_they_are_not_kept(has_own: bool) -> None:
    """Over the loader of `training_data=`, in a worker that was new at step 5."""
    session: Any = SimpleNamespace(assignment=SimpleNamespace(generation=3))
    progress = TrainingProgress(step=5)
    engine: Any = SimpleNamespace(
        training_dataloader=object(), lr_scheduler=None, progress=progress
    )
    kept = make_schedules("exponential") if has_own else KeptSchedules()
    followed = StepwiseSchedules(session, kept)
    followed.follow(engine)
    progress.lose_step(TrainingProgress(step=4))
    with pytest.raises(CollectiveError, match="not kept") if has_own else nullcontext():
        followed.follow(engine)
