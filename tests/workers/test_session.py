from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rayzero.deepspeed.entry import initialize
from rayzero.engine.engine import Engine
from rayzero.engine.errors import CollectiveError, ConfigError, DataError, EngineError
from rayzero.engine.session import NO_REQUESTS, StepRequests, use_session
from rayzero.workers import ledger_writer
from rayzero.workers.context import Context
from rayzero.workers.messages import (
    SCRIPT_ENTRYPOINT,
    Divided,
    MirrorPolicy,
    Restored,
    StepReport,
    WentBack,
    WorkerMessage,
)
from rayzero.workers.session import JobSession
from rayzero.workers.training_thread import GenerationChannel
from rayzero.workers.vault.records import Restore
from tests.engine.state.blocks import Block, StateSession
from tests.workers import recovery_jobs
from tests.workers.support import GivenUp, session, setup


def context(**changes: Any) -> tuple[Context, GenerationChannel, list[WorkerMessage]]:
    job_session, channel, posted = session(**changes)
    return Context(setup(**changes), torch.device("cpu"), job_session), channel, posted


def report_of(posted: list[WorkerMessage]) -> StepReport:
    (report,) = posted
    assert isinstance(report, StepReport)
    return report


def test_reading_unset_steps_names_missing_key():
    ctx, _, _ = context(steps=None)
    with pytest.raises(ConfigError, match="set `steps:` in the job file"):
        _ = ctx.steps


def test_without_engine_report_finishes_step():
    ctx, channel, posted = context()
    ctx.report(tokens=10, loss=3.0)
    ctx.report(tokens=torch.tensor(5), loss=2.0)
    assert posted == []
    ctx.report(step=1, accuracy=0.5)
    report = report_of(posted)
    assert (report.generation, report.rank, report.step) == (1, 0, 1)
    assert report.counters == {"tokens": 15}
    assert report.gauges.pop("step_s") >= 0
    assert report.gauges.pop("cpu_cores") > 0
    assert report.gauges == {"loss": 2.0, "accuracy": 0.5}
    assert channel.progress.step == 2
    ctx.report(step=2)
    assert report_of(posted[1:]).counters == {}
    assert set(report_of(posted[1:]).gauges) == {"step_s", "cpu_cores"}
    ctx.report(tokens=7)
    assert ctx._session.reporter.leftover_counters() == {"tokens": 7}


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 129, "phases/own", "collectives/a/bytes"])
def test_invalid_metric_name_is_rejected(name: str):
    ctx, _, posted = context()
    ctx.report(**{"eval/top-1 accuracy (%)": 50.0})
    with pytest.raises(EngineError, match=r"ctx\.report with a metric named"):
        ctx.report(**{name: 1.0})
    ctx.report(step=1)
    assert set(report_of(posted).gauges) == {"eval/top-1 accuracy (%)", "step_s", "cpu_cores"}


def test_engine_finishes_step():
    ctx, _, posted = context()
    job_session = ctx._session
    engine, *_ = initialize(model=torch.nn.Linear(1, 1), config=recovery_jobs.engine_config(1))
    job_session.on_engine_ready(engine)
    ctx.report(step=99, tokens=4, loss=9.0)
    assert [type(message) for message in posted] == [Restored]
    job_session.on_step_end({"step": 1.0, "loss": 2.0, "step_s": 0.25}, NO_REQUESTS)
    report = report_of(posted[1:])
    assert report.step == 1
    assert report.gauges.pop("resident_bytes") > 2**20
    assert report.gauges.pop("cpu_cores") > 0
    defaults = {"phases/mirror": 0, "phases/other": 0, "checkpoint_s": 0, "skipped": 0}
    assert report.gauges == {"loss": 2.0, "step_s": 0.25, **defaults}
    assert report.counters == {"tokens": 4}


@pytest.mark.parametrize(("step", "lost", "is_error"), [(3, 1, False), (4, 1, True), (4, 0, False)])
def test_a_loop_that_ends_early_is_told_from_one_that_counts_lost_steps(step, lost, is_error):
    """Of 5 steps: one that counts its iterations leaves after 5, lost ones included."""
    job_session, *_ = session()
    engine, *_ = initialize(model=torch.nn.Linear(1, 1), config=recovery_jobs.engine_config(1))
    job_session.on_engine_ready(engine)
    engine.progress.step, engine.progress.lost_steps = step, lost
    with pytest.raises(CollectiveError, match="4 of 5") if is_error else nullcontext():
        job_session.check_loop()


def test_state_is_registered_before_and_after_the_engine_is_there():
    ctx, *_ = context()
    job_session = ctx._session
    early, late = list[Any](), list[Any]()
    ctx.state("early", lambda: 1, early.append)
    config = recovery_jobs.engine_config(1)
    saved, *_ = initialize(model=torch.nn.Linear(1, 1), config=config)
    for name in ("early", "late"):
        saved.state.register(name, lambda name=name: name, print)
    with use_session(StateSession([Block.of(saved)])):
        engine, *_ = initialize(model=torch.nn.Linear(1, 1), config=config)
    job_session.on_engine_ready(engine)
    ctx.state("late", lambda: 2, late.append)
    assert (early, late) == (["early"], ["late"])
    with pytest.raises(EngineError, match="state 'early' is registered twice"):
        ctx.state("early", lambda: 1, early.append)
    with pytest.raises(EngineError, match="state 'late' is registered twice"):
        engine.state.register("late", lambda: 1, early.append)


@pytest.mark.parametrize("restore", [None, Restore(3, checkpoint="/step-3")])
def test_the_first_version_has_the_collectives_that_the_function_called(
    monkeypatch: pytest.MonkeyPatch, restore: Restore | None
):
    """Roles read a version before the first step. New members start from it too."""
    policy = MirrorPolicy(version_every_steps=1)
    job_session, *_ = session(restore, mirror=policy)
    engine, *_ = initialize(model=torch.nn.Linear(1, 1), config=recovery_jobs.engine_config(1))
    job_session.on_engine_ready(engine)
    known = list[bool]()
    begin = job_session._mirror.begin

    def begin_seen(state: Any) -> None:
        known.append("rayzero.collectives" in engine.state.registry)
        begin(state)

    monkeypatch.setattr(job_session._mirror, "begin", begin_seen)
    job_session.on_phase("data")
    job_session.on_phase("data")
    assert known == [True]


@pytest.mark.parametrize("value", ["many", None, torch.zeros(2), [1]])
def test_non_numeric_value_is_named_in_error(value: Any):
    ctx, _, _ = context()
    with pytest.raises(EngineError, match=r"ctx\.report\(loss="):
        ctx.report(loss=value)


@pytest.mark.parametrize("step", [0, 1])
def test_steps_must_increase_from_one(step: int):
    ctx, _, _ = context()
    ctx.report(step=1)
    with pytest.raises(EngineError, match="after step 1"):
        ctx.report(step=step)


def test_interrupt_ends_function_at_next_report_phase_or_step():
    ctx, channel, posted = context()
    job_session = ctx._session
    job_session.on_phase("forward")
    channel.interrupt.set()
    for act in (
        lambda: ctx.report(loss=1.0),
        lambda: job_session.on_phase("data"),
        lambda: job_session.on_collective_wait(3, True),
        lambda: job_session.on_step_end({"step": 1.0}, NO_REQUESTS),
    ):
        with pytest.raises(GivenUp):
            act()
    reports = [message for message in posted if isinstance(message, StepReport)]
    assert [report.step for report in reports] == [1]  # the step that was finished counts


def test_agreed_drain_ends_function_where_the_next_step_begins():
    job_session, channel, posted = session()
    assert not job_session.step_requests().drain
    channel.drain.set()
    assert job_session.step_requests().drain
    job_session.on_step_end({"step": 1.0}, StepRequests(drain=True))
    assert isinstance(posted[-1], StepReport)
    survival = SimpleNamespace(is_enabled=False)
    engine: Any = SimpleNamespace(module=nn.Linear(1, 1), survival=survival)
    job_session.engine = engine
    with torch.no_grad():
        job_session.on_phase("forward")
    engine.module.eval()
    job_session.on_phase("data")
    job_session.on_collective_wait(1, entered=True)
    engine.module.train()
    for phase in ("data", "forward", "backward", "reduce"):
        with pytest.raises(GivenUp):
            job_session.on_phase(phase)
    assert channel.drained
    assert not channel.interrupt.is_set()


@pytest.mark.parametrize(
    ("reads", "divided"),
    [
        (lambda loader: loader, True),
        (lambda loader: [*loader], False),  # the samples of later steps are read
        (lambda loader: pairwise(loader), False),
        (lambda loader: (next(iter(loader)) for _ in range(9)), True),
    ],
)
def test_shares_change_where_the_next_step_begins_if_its_samples_are_not_read(reads, divided):
    job_session, channel, posted = session()
    data = torch.ones(40, 1, dtype=torch.float64)
    model = nn.Linear(1, 1).double()
    with use_session(job_session):
        config = recovery_jobs.engine_config(1)
        engine, _, loader, _ = initialize(model=model, config=config, training_data=data)
    job_session._mirror.step_done = lambda *_: None  # type: ignore[method-assign]
    channel.new_shares = (1.0,)
    for batch in reads(loader):
        engine.backward(engine(batch[0] if isinstance(batch, tuple) else batch).mean())
        engine.step()
        if engine.global_steps == 2:
            break
        assert not any(isinstance(it, Divided) for it in posted)
    changes = [it for it in posted if isinstance(it, Divided)]
    assert changes == [Divided(1, 0, (1.0,))] * divided
    assert bool(channel.new_shares) != divided


def session_with_ledger(folder: Path, patience_s: float = 60.0) -> JobSession:
    changes = {"ledger": True, "output_dir": str(folder), "patience_s": patience_s}
    return session(**changes)[0]


def test_ledger_that_cannot_be_written_for_a_while_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ledger_writer, "RETRY_S", 0.01)
    job_session = session_with_ledger(tmp_path)
    (ledger,) = tmp_path.rglob("*.jsonl")
    moved = ledger.rename(tmp_path / "moved")
    failures = iter(range(20))

    def repair() -> None:
        if next(failures) == 5:
            moved.rename(ledger)

    monkeypatch.setattr(job_session._channel.interrupt, "check", repair)
    job_session.on_samples_consumed([3, 1])
    job_session.step_requests()
    (line,) = ledger.read_text().splitlines()
    assert json.loads(line)["samples"] == [3, 1]
    assert next(failures) == 6


def test_ledger_is_waited_for_shorter_than_a_hang(tmp_path: Path):
    (tmp_path / "ledger").write_text("a file, not a folder")
    with pytest.raises(DataError, match="cannot be written"):
        session_with_ledger(tmp_path, patience_s=0.01)


def test_ledger_of_another_run_is_no_outage(tmp_path: Path):
    session_with_ledger(tmp_path)
    with pytest.raises(DataError, match="cannot be written"):
        session_with_ledger(tmp_path)


def two_engines(job_session: JobSession) -> tuple[Engine, Engine]:
    config = recovery_jobs.engine_config(1)
    with use_session(job_session):
        frozen, *_ = initialize(model=nn.Linear(1, 1).requires_grad_(False), config={})
        engines = [
            initialize(model=nn.Linear(1, 1), config=config, name=name)[0]
            for name in ("actor", "critic")
        ]
    assert frozen.global_steps == 0
    return engines[0], engines[1]


def step(engine: Engine) -> None:
    engine.backward(engine(torch.ones(engine.settings.batches.micro_batch, 1)).sum())
    engine.step()


def test_a_step_of_the_job_ends_when_all_engines_have_stepped():
    """One that only evaluates may be built first, and is none of them."""
    job_session, _, posted = session(mirror=MirrorPolicy(checkpoint_every_steps=10))
    actor, critic = two_engines(job_session)
    for engine in (actor, actor, critic, critic):
        step(engine)
    (report,) = [it for it in posted if isinstance(it, StepReport)]
    assert report.step == 1
    losses = report.gauges["loss"], report.gauges["critic/loss"]
    assert losses == (actor.metrics.loss, pytest.approx(losses[1]))
    assert report.gauges["critic/lr"] == pytest.approx(1e-2)
    assert report.gauges["bytes/model_weights"] == 2 * actor.metrics.bytes["model_weights"]
    step(actor)
    assert [it.step for it in posted if isinstance(it, StepReport)] == [1, 2]


def test_only_the_vote_that_ends_a_step_carries_requests():
    job_session, channel, _ = session()
    two_engines(job_session)
    channel.drain.set()
    first, second = (job_session.step_requests(it) for it in ("", "critic"))
    assert (first.drain, first.engine, second.engine) == (False, 1, 2)
    job_session.engines.step.count("", lost=False)
    assert job_session.step_requests("critic").drain


def test_an_engine_that_does_not_step_is_named(caplog: pytest.LogCaptureFixture):
    job_session, _, posted = session()
    actor, _ = two_engines(job_session)
    for _ in range(200):
        step(actor)
    said = [it.message for it in caplog.records if "has not stepped" in it.message]
    assert ["critic has not stepped since the others did 1" in said[0], len(said)] == [True, 2]
    assert not any(isinstance(it, StepReport) for it in posted)


def test_steps_end_without_an_engine_that_was_closed():
    job_session, _, posted = session()
    actor, critic = two_engines(job_session)
    critic.destroy()
    step(actor)
    assert [it.step for it in posted if isinstance(it, StepReport)] == [1]


@pytest.mark.parametrize("name", ["", "a:b", "a/b", "x" * 65, "a\n", "actor", "critic"])
def test_a_name_that_cannot_be_used_is_refused(name: str):
    job_session, *_ = session()
    two_engines(job_session)
    with use_session(job_session), pytest.raises(ConfigError, match=r"initialize\(name="):
        initialize(model=nn.Linear(1, 1), config=recovery_jobs.engine_config(1), name=name)


def engine_with_checkpoints(job_session: JobSession, folder: Path, restored: int = 3) -> Engine:
    """At step 3, in a generation that began at step `restored`, with other weights than its
    checkpoints: of step 4, and of step 2 without a client state and with one."""
    with use_session(job_session):
        config = recovery_jobs.engine_config(1)
        engine, *_ = initialize(model=nn.Linear(1, 1), config=config)
    size = engine.train_batch_size()
    for tag, step, client_state in (("new", 4, {"a": 1}), ("old", 2, {}), ("told", 2, {"a": 1})):
        engine.progress.step, engine.progress.sample_cursor = step, step * size
        engine.save_checkpoint(str(folder), tag, client_state)
    engine.progress.step, engine.progress.sample_cursor = 3, 3 * size
    job_session.reporter.start_at(restored)
    if restored < 3:
        job_session.reporter.build(3)
    with torch.no_grad():
        engine.module.weight += 1
    return engine


@pytest.mark.parametrize("survivors_stay", [False, True])
def test_checkpoint_older_than_the_job_is_not_loaded(tmp_path: Path, survivors_stay: bool):
    """A script that is entered again loads its own: the engine stays at the job's step. A client
    state, which would say otherwise, is refused with Accelerate, and in a new rank, which would
    train at an older step than those that stay in their loops."""
    job_session, _, posted = session()
    if survivors_stay:
        membership = job_session.membership
        staying = replace(membership.assignment, survivors_stay=True)
        job_session.membership = replace(membership, assignment=staying)
    else:
        job_session.divide_step(1)
    engine = engine_with_checkpoints(job_session, tmp_path)
    before = engine.module.weight.item()
    assert engine.load_checkpoint(str(tmp_path), "old")[1] == {}
    with pytest.raises(ConfigError, match=r"step 2, .*\['a'\].* 3 finished steps"):
        engine.load_checkpoint(str(tmp_path), "told")
    assert (engine.global_steps, engine.module.weight.item()) == (3, before)
    assert engine.load_checkpoint(str(tmp_path), "new")[1] == {"a": 1}
    assert (engine.global_steps, engine.module.weight.item()) == (4, pytest.approx(before - 1))
    assert not any(isinstance(message, WentBack) for message in posted)


@pytest.mark.parametrize("restored", [0, 3])  # 3: the script was entered after its last step
@pytest.mark.parametrize("tag", ["old", "told"])
def test_best_model_is_loaded_after_the_last_step_and_not_trained(
    tmp_path: Path, tag: str, restored: int
):
    job_session, _, posted = session(entrypoint=SCRIPT_ENTRYPOINT)
    engine = engine_with_checkpoints(job_session, tmp_path, restored)
    if restored:
        with use_session(job_session):
            loader = engine.deepspeed_io(torch.arange(engine.train_batch_size()))
        assert [len(list(loader)) for _ in range(3)] == [0, 0, 0]
    before = engine.module.weight.item()
    assert engine.load_checkpoint(str(tmp_path), tag)[0]
    assert engine.module.weight.item() == pytest.approx(before - 1)
    assert not any(isinstance(message, WentBack) for message in posted)
    with pytest.raises(ConfigError, match=r"load_checkpoint of step 2, .* has finished 3 steps"):
        job_session.step_requests()


def test_last_step_is_kept_before_another_state_is_loaded_and_when_the_function_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job_session, _, _ = session(entrypoint=SCRIPT_ENTRYPOINT)
    engine = engine_with_checkpoints(job_session, tmp_path, restored=0)
    kept: list[tuple[int, float]] = []
    monkeypatch.setattr(
        *(job_session._mirror, "finish"),
        lambda step, state: kept.append((step, engine.module.weight.item())),
    )
    trained = engine.module.weight.item()
    job_session.finish()
    engine.load_checkpoint(str(tmp_path), "old")
    job_session.finish()
    assert kept == [(3, trained)] * 2


def test_checkpoint_of_a_finished_epoch_is_not_written_again(tmp_path: Path):
    """A script that was entered again after two epochs repeats what it does after each."""
    job_session, _, _ = session(entrypoint=SCRIPT_ENTRYPOINT)
    engine = engine_with_checkpoints(job_session, tmp_path)
    size = engine.train_batch_size()
    with use_session(job_session):
        loader = engine.deepspeed_io(torch.arange(size))
    engine.progress.step, engine.progress.sample_cursor = 2, 2 * size
    batches = list[int]()
    for number in range(3):
        batches.append(len(list(loader)))
        engine.save_checkpoint(str(tmp_path), f"epoch-{number}")
    assert batches == [0, 0, loader.micro_steps]
    assert not (tmp_path / "epoch-0").exists()
    assert (tmp_path / "epoch-1").exists()


def test_job_goes_back_to_a_checkpoint_that_tells_its_place(tmp_path: Path):
    job_session, channel, posted = session(entrypoint=SCRIPT_ENTRYPOINT)
    engine = engine_with_checkpoints(job_session, tmp_path)
    before = engine.module.weight.item()
    epoch = torch.arange(2 * engine.train_batch_size())
    with use_session(job_session):
        loader = engine.deepspeed_io(epoch)
    assert engine.load_checkpoint(str(tmp_path), "told")[1] == {"a": 1}
    # The script begins at the place that it was told: its next iteration is no finished epoch.
    assert torch.cat([batch.cpu() for batch in loader]).sort().values.equal(epoch)
    assert (engine.global_steps, engine.module.weight.item()) == (2, pytest.approx(before - 1))
    assert posted[-1] == WentBack(1, 0, 2)
    assert job_session._mirror.newest_step == 2
    assert channel.progress.step == 3  # the one that is worked on
    engine.progress.step = 3
    job_session.on_step_end({"step": 3.0}, NO_REQUESTS)
    assert report_of(posted[-1:]).step == 3
    assert engine.load_checkpoint(str(tmp_path), "told")[0]
    assert sum(isinstance(message, WentBack) for message in posted) == 1


def test_ranks_that_step_different_engines_change_nothing() -> None:
    alike = [StepRequests(engine=2).to_scalars() for _ in range(3)]
    assert StepRequests.from_sums([sum(it) for it in zip(*alike, strict=True)], 3).engine == 2
    apart = [StepRequests(engine=it).to_scalars() for it in (1, 3, 2)]  # their mean is 2, too
    with pytest.raises(EngineError, match="different engines at once"):
        StepRequests.from_sums([sum(it) for it in zip(*apart, strict=True)], 3)
