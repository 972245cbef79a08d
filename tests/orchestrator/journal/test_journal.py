"""The journal: what is written, what is read again, and what is never written."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.redact import REDACTED, redact_document, redact_url, redacted_keys
from rayzero.orchestrator.job import recorder as behind_module
from rayzero.orchestrator.job.recorder import BackgroundLineWriter
from rayzero.orchestrator.job_events import Checkpointed, CheckpointFailed, FaultDetected, Repaired
from rayzero.orchestrator.job_file import (
    ADOPTABLE_KEYS,
    diff_documents,
    not_covered_by,
    to_document,
)
from rayzero.orchestrator.journal.run_history import (
    MAX_ENTRIES,
    RunHistory,
    faults_on_clock,
    fold_journal,
    why_not_adoptable,
)
from rayzero.orchestrator.journal.writer import (
    DEFAULT_STEP_INTERVAL_S,
    MAX_SEGMENT_BYTES,
    JournalSegments,
    JournalWriter,
    read_journal,
)
from rayzero.orchestrator.metrics.catalog import user_gauges
from rayzero.orchestrator.metrics.job_metrics import JobInfo, JobMetrics, Timestamps
from rayzero.orchestrator.metrics.snapshot import restore_metrics
from rayzero.orchestrator.policies.failure import FaultBudget
from tests.orchestrator.support import Stage, plan, played, settle

ENGINE = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def begun(folder: Path, **changes: Any) -> list[str]:
    lines: list[str] = []
    spec = plan(folder, **changes).spec
    at_s = iter(range(100, 10_000))
    chronicle = JournalWriter(lines.append, lambda: float(next(at_s)))
    chronicle.append(
        "begun", run="1", adopted=False, spec=to_document(spec), working_dir="/w", by_value=False
    )
    return lines


def known(lines: Sequence[str]) -> RunHistory:
    past = fold_journal(lines)
    assert past is not None
    return past


@played
async def test_a_run_is_read_as_it_went(folder: Path):
    lines = begun(folder)
    chronicle = JournalWriter(lines.append, count(200.0, DEFAULT_STEP_INTERVAL_S).__next__)
    stage = Stage(folder, journal=chronicle, workers={"min": 1, "max": 2})
    await stage.steps(3)
    stage.world.kill(1)
    await stage.clock.turn(1)
    await stage.steps(2)
    past = known(lines)
    (seen,) = stage.notebook.of(FaultDetected)
    (repaired,) = stage.notebook.of(Repaired)
    assert (past.state, past.end_state) == ("running", "")
    assert (past.generation, past.step) == (2, stage.controller.status().step)
    assert [(one.cause, one.rank, one.worker) for one in past.faults] == [
        (seen.cause, seen.rank, seen.worker)
    ]
    assert (past.repairs_by_cause, past.steps_redone) == ({"lost": 1}, repaired.steps_redone)
    stage.run.cancel()
    await settle()


@given(st.data())
def test_any_torn_journal_tells_of_an_earlier_moment(data: st.DataObject):
    lines = begun(Path("/tmp/rz-journal"))
    chronicle = JournalWriter(lines.append, lambda: 1.0)
    for n in range(1, 6):
        chronicle.append("moved", state="running", event="e", generation=n, world_size=2, step=n)
    ends = list(accumulate(len(line) + 1 for line in lines))
    cut = data.draw(st.integers(ends[0], ends[-1]))
    past = known("\n".join(lines)[:cut].splitlines())
    whole = sum(end - 1 <= cut for end in ends) - 1
    assert (past.step, past.generation) == (whole, whole)


@given(st.lists(st.text()))
def test_what_is_no_journal_is_passed_over(lines: list[str]):
    assert fold_journal([*lines, "[]", "{}", '{"at_s": 1, "kind": "moved"}']) is None


def test_files_are_numbered_and_a_later_process_goes_on_behind(tmp_path: Path):
    first = JournalSegments(str(tmp_path))
    first.write(begun(tmp_path))
    filler = json.dumps({"at_s": 1.0, "kind": "noted", "step": 1})
    first.write([filler] * (2 * MAX_SEGMENT_BYTES // len(filler)))
    JournalSegments(str(tmp_path)).write([json.dumps({"at_s": 9.0, "kind": "step", "step": 7})])
    names = sorted(path.name for path in (tmp_path / "journal").iterdir())
    assert [name[:6] for name in names] == [f"{n:06d}" for n in range(1, len(names) + 1)]
    assert len(names) > 2
    past = read_journal(str(tmp_path))
    assert past is not None
    assert (past.step, past.working_dir) == (7, "/w")
    assert read_journal(str(tmp_path / "other")) is None


def test_a_journal_grows_by_what_happens_and_not_with_time(tmp_path: Path):
    def line(kind: str, step: int) -> str:
        moved = {"state": "running", "generation": 1, "world_size": 2}
        return json.dumps({"at_s": float(step), "kind": kind, "step": step, **moved})

    segments = JournalSegments(str(tmp_path))
    segments.write(begun(tmp_path))
    for step in range(0, 3000, 10):  # a few at a time, and some of them alone
        segments.write([line("step", step + n) for n in range(step % 4)] or [line("step", step)])
    segments.write([line("moved", 5000), line("step", 5001), line("step", 5002)])
    (file,) = (tmp_path / "journal").iterdir()
    kinds = [json.loads(one)["kind"] for one in file.read_text().splitlines()]
    assert kinds == ["begun", "step", "moved", "step"]
    past = read_journal(str(tmp_path))
    assert past is not None
    assert (past.step, past.last_at_s) == (5002, 5002.0)


@pytest.mark.parametrize(
    "failure", [StoreError("full", "disk", "No space left on device"), ValueError("odd")]
)
def test_a_store_that_fails_is_told_once_and_tried_again(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(behind_module, "RETRY_DELAYS_S", (0.01,))
    told: list[str] = []
    written: list[str] = []
    failures = iter([True, True, True])
    done = threading.Event()

    def write(lines: Sequence[str]) -> None:
        if next(failures, False):
            raise failure
        written.extend(lines)
        done.set()

    behind = BackgroundLineWriter("the journal", write, 0.01, told.append)
    behind.enqueue("a")
    behind.enqueue("b")
    assert done.wait(10)
    assert behind.close(5)
    assert written == ["a", "b"]
    assert len(told) == 1
    assert "the journal cannot be written" in told[0]


def test_a_store_that_never_answers_holds_nobody_up():
    release = threading.Event()
    behind = BackgroundLineWriter(
        "the log", lambda _: release.wait(10) and None, 0.0, lambda _: None
    )
    behind.enqueue("a")
    assert not behind.close(0.2)
    release.set()


def test_no_secret_is_written():
    spec = {
        "args": {"hf_token": "abc", "tokenizer": "gpt2", "pad_token": "<pad>", "n_tokens": 7},
        "checkpoint": {"path": "s3://me:pass@bucket/runs?secret_key=xyz&region=a"},
        "env": {"AWS_SECRET_ACCESS_KEY": "abc", "apiKey": "abc", "list": ["http://u:abc@h/"]},
    }
    taken = redact_document(spec)
    text = json.dumps(taken)
    assert not {"abc", "xyz", "pass"} & {*text.replace('"', " ").replace("@", " ").split()}
    assert "xyz" not in text
    assert taken["args"] | {"hf_token": "abc"} == spec["args"]
    assert set(redacted_keys(taken)) == {
        *("args.hf_token", "checkpoint.path"),
        *("env.AWS_SECRET_ACCESS_KEY", "env.apiKey", "env.list"),
    }
    assert (
        redact_url("see https://u:p@h/x and s3://b/k") == f"see https://{REDACTED}@h/x and s3://b/k"
    )


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"entrypoint": "m:g"}, 'entrypoint: "m:f" -> "m:g"'),
        ({"args": {"layers": 3}}, "args.layers: (none) -> 3"),
        ({"engine": ENGINE | {"train_batch_size": 24}}, "engine.train_batch_size: 12 -> 24"),
    ],
)
def test_another_training_is_not_the_lost_one(tmp_path: Path, changes: dict[str, Any], key: str):
    past = known(begun(tmp_path, engine=ENGINE))
    refused = why_not_adoptable(past, plan(tmp_path, **{"engine": ENGINE, **changes}).spec)
    assert refused is not None
    assert f"    {key}" in str(refused)
    assert "rayzero stop job" in str(refused)


def test_the_same_training_elsewhere_faster_or_safer_goes_on(tmp_path: Path):
    past = known(begun(tmp_path, engine=ENGINE))
    engine = ENGINE | {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}
    changes = {
        "engine": engine,
        "workers": {"min": 1, "max": 3},
        "steps": 50,
        "recovery": {"replicas": 0},
        "checkpoint": {"every_steps": 5, "keep": 1},
    }
    assert why_not_adoptable(past, plan(tmp_path, **changes).spec) is None


LEAF = st.integers() | st.text(max_size=3) | st.booleans()
TREES = st.recursive(
    LEAF, lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
)
DOCUMENTS = st.dictionaries(st.sampled_from(["workers", "engine", "seed"]), TREES, max_size=3)


@given(DOCUMENTS, DOCUMENTS)
def test_a_difference_is_seen_from_both_sides(old: dict[str, Any], new: dict[str, Any]):
    there, back = diff_documents(old, new), diff_documents(new, old)
    assert [(one.key, one.old, one.new) for one in there] == [
        (one.key, one.new, one.old) for one in back
    ]
    assert diff_documents(old, old) == []
    assert not [
        one for one in not_covered_by(there, ADOPTABLE_KEYS) if one.key.startswith("workers")
    ]


def test_faults_keep_their_age(tmp_path: Path):
    lines = begun(tmp_path)
    worker = {"index": 1, "node_id": "n", "node": "n", "ip": "i", "pid": 7}
    found = {"cause": "lost", "worker": worker, "rank": 1, "step": 5, "generation": 1}
    JournalWriter(lines.append, lambda: 1000.0).append("fault", **found, detail="it was killed")
    (fault,) = faults_on_clock(known(lines), now_s=50.0, unix_s=1030.0)
    assert (fault.at_s, fault.detail, fault.worker.pid) == (20.0, "it was killed", 7)


@played
async def test_an_adopted_run_keeps_its_numbers_and_its_budget(folder: Path):
    lines = begun(folder)
    chronicle = JournalWriter(lines.append)
    worker = {"index": 1, "node_id": "n", "node": "n", "ip": "i", "pid": 7}
    for generation in (4, 5):
        found = {"cause": "lost", "worker": worker, "rank": 1, "step": 5, "generation": generation}
        chronicle.append("fault", **found, detail="")
    chronicle.append("moved", state="running", event="e", generation=5, world_size=2, step=40)
    chronicle.on_event(Checkpointed(42, "f", 1, 0.1, 0.0))
    stage = Stage(folder, past=known(lines), recovery={"max_faults": 2})
    await stage.steps(2)
    status = stage.controller.status()
    assert (status.generation, status.faults) == (6, {"lost": 2})
    assert stage.told.snapshot()["generation"] == 6
    stage.world.kill(1)
    await stage.clock.turn(5)
    with pytest.raises(Exception, match="was lost"):
        await stage.result()


@played
async def test_what_a_page_lists_goes_on(folder: Path):
    lines = begun(folder)
    chronicle = JournalWriter(lines.append)
    stage = Stage(folder, journal=chronicle, workers={"min": 1, "max": 2})
    await stage.steps(3)
    stage.world.kill(1)
    await stage.clock.turn(1)
    await stage.steps(2)
    await stage.clock.turn(5)
    await stage.steps(2)
    stage.events.emit(Checkpointed(4, "f", 7, 0.5, 0.0))
    before = stage.told.snapshot()
    stage.run.cancel()
    await settle()
    again = Stage(folder, past=known(lines), workers={"min": 1, "max": 2})
    after = again.told.snapshot()
    for key in ("generations", "faults", "recoveries", "checkpoints"):
        assert len(before[key]) > 0, key
        assert [untimed(one) for one in after[key]] == [untimed(one) for one in before[key]], key
    await again.steps(1)
    generations = [one["generation"] for one in again.told.snapshot()["generations"]]
    assert generations == sorted(set(generations))
    assert len(generations) == len(before["generations"]) + 1
    again.run.cancel()
    await settle()


def untimed(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "at_s"}


def test_a_journals_list_has_a_bound_and_passes_over_what_it_does_not_know(tmp_path: Path):
    lines = begun(tmp_path)
    chronicle = JournalWriter(lines.append)
    for generation in range(1, MAX_ENTRIES + 10):
        chronicle.append(
            "moved", state="running", event="e", generation=generation, world_size=2, step=1
        )
    chronicle.append("resized", reason="of a later version")
    tally = JobMetrics(
        JobInfo("j", 1, None, 1, 1, 1.0, FaultBudget(1, 1.0)), Timestamps(0.0, 0.0), user_gauges
    )
    restore_metrics(tally, known(lines), Timestamps(0.0, 0.0))
    assert [one["generation"] for one in tally.history.generations][-1] == MAX_ENTRIES + 9
    assert len(tally.history.generations) == MAX_ENTRIES
    assert not tally.history.recoveries


@played
async def test_what_was_counted_goes_on(folder: Path):
    """From one process to the next and the one after: sums, and the wall time since the first."""
    lines = begun(folder)
    began_s = time.time() - 500
    lines = [json.dumps(json.loads(line) | {"at_s": began_s}) for line in lines]
    chronicle = JournalWriter(lines.append, lambda: began_s + 100)
    worker = {"index": 1, "node_id": "n", "node": "n", "ip": "i", "pid": 7}
    chronicle.append("fault", cause="lost", worker=worker, rank=1, step=5, generation=1, detail="")
    chronicle.on_event(Repaired("lost", ("rank 1",), 9, 0, 2, 2, {"load": 1.0}))
    chronicle.on_event(Checkpointed(10, "f", 1, 0.1, 0.0))
    chronicle.on_event(CheckpointFailed(12, "full", 1, None))
    counted = {"seconds": {"productive": 60.0, "starting": 30.0}, "done": 11, "tokens": 7.0}
    chronicle.counter_source = lambda: counted
    chronicle.append("moved", state="running", event="e", generation=1, world_size=2, step=12)

    stage = Stage(folder, past=known(lines), journal=chronicle)  # there is no checkpoint
    chronicle.counter_source = stage.told.dump_counters
    assert stage.controller.status().step == 12
    await stage.steps(2)
    value = stage.told.snapshot()
    goodput = value["goodput"]
    assert goodput["seconds"]["adoption"] == pytest.approx(410, abs=5)
    assert goodput["wall_s"] == pytest.approx(500, abs=5)
    assert sum(goodput["seconds"].values()) + goodput["unattributed_s"] == pytest.approx(
        goodput["wall_s"]
    )
    assert value["steps_redone"] == 12
    assert value["began_s"] == pytest.approx(began_s)
    series = {
        (one.name, *sorted(one.labels.values())): one.value
        for family in stage.told.families()
        for one in family.samples
    }
    assert series["rayzero_faults_total", "job", "lost"] == 1
    assert series["rayzero_repairs_total", "job", "lost"] == 1
    assert series["rayzero_checkpoints_total", "job"] == 1
    assert series["rayzero_checkpoint_failures_total", "job"] == 1
    assert series["rayzero_steps_total", "job"] == 13
    chronicle.append("moved", state="running", event="e", generation=2, world_size=2, step=2)
    again = known(lines)
    assert (
        again.steps_redone,
        again.total_repairs,
        again.checkpoints_written,
        again.checkpoints_failed,
    ) == (12, 1, 1, 1)
    assert (again.step, again.best_step) == (2, 12)
    assert again.counters["seconds"]["productive"] >= 60.0
    assert again.counters["seconds"]["adoption"] == pytest.approx(410, abs=5)
    result = await stage.finish()
    assert result.metrics["steps_redone"] == 12
    assert result.metrics["checkpoints"]["failed"] == 1
