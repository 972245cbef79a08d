"""The journal: reading, writing, and adoption of a job from its journal."""

from __future__ import annotations

import json
import math
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.redact import REDACTED, redact_document, redact_url, redacted_keys
from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.orchestrator.facts import Counters, EventBus, JobFacts
from rayzero.orchestrator.job.lease import LeaseLostError
from rayzero.orchestrator.job.past_runs import why_not_adoptable
from rayzero.orchestrator.job_events import (
    Checkpointed,
    CheckpointFailed,
    CheckpointsPruned,
    FaultRecorded,
    JobWarning,
    Repaired,
    StateEntered,
)
from rayzero.orchestrator.job_file import (
    ADOPTABLE_KEYS,
    diff_documents,
    not_covered_by,
    to_document,
)
from rayzero.orchestrator.journal.entries import (
    JournalUpdate,
    JournalWriter,
    facts_json,
    fold_entries,
)
from rayzero.orchestrator.journal.files import JournalFiles, has_journal, read_journal
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.policies.failure import Fault, FaultCause
from rayzero.orchestrator.progress import StepRecord
from rayzero.workers.messages import WorkerInfo
from tests.orchestrator.support import Harness, begun, plan, reread, settle

ENGINE = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


WORKER = WorkerInfo(1, "n", "n", "i", 7)
FAULT = FaultRecorded(Fault(FaultCause.PROCESS_LOST, WORKER, 1, 5, "", generation=1))


def begun_facts(folder: Path, at_s: float = 1000.0, **changes: Any) -> JobFacts:
    return JobFacts().apply(begun(plan(folder, **changes)), at_s)


def running(generation: int, step: int) -> StateEntered:
    return StateEntered(State.RUNNING, generation, 2, step)


def start_journal(
    folder: Path, put: Callable[[JournalUpdate], None], unix: Callable[[], float] = time.time
) -> EventBus:
    events = EventBus(unix=unix)
    JournalWriter(put, events)
    events.emit(begun(plan(folder)))
    return events


@given(st.data())
def test_truncated_journal_of_earlier_release_is_read(data: st.DataObject):
    spec = to_document(plan(Path("/tmp/rz-journal")).spec)
    entries = [
        {"kind": "begun", "run": "1", "spec": spec, "working_dir": "/w", "by_value": False},
        *(
            {"kind": "moved", "state": "running", "generation": n, "world_size": 2, "step": n}
            for n in range(1, 6)
        ),
    ]
    lines = [json.dumps({"at_s": 1.0, **entry}) for entry in entries]
    ends = list(accumulate(len(line) + 1 for line in lines))
    cut = data.draw(st.integers(ends[0], ends[-1]))
    with tempfile.TemporaryDirectory() as folder:
        segments = Path(folder, "journal")
        segments.mkdir()
        (segments / "000001-00000000.jsonl").write_text("\n".join(lines)[:cut])
        history = read_journal(folder)
    assert history is not None
    complete = sum(end - 1 <= cut for end in ends) - 1
    assert (history.step, history.generation) == (complete, complete)


@given(st.lists(st.dictionaries(st.text(), st.integers()) | st.just({"kind": "moved", "at_s": 1})))
def test_unknown_entries_are_ignored(entries: list[dict[str, Any]]):
    assert fold_entries(entries) is None


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"format": 9}', b"\x00"])
def test_invalid_state_file_is_ignored(tmp_path: Path, content: bytes):
    (tmp_path / "job.json").write_bytes(content)
    assert read_journal(str(tmp_path)) is None


WORKER_FIELDS = {"index": 1, "node_id": "n", "node": "n", "ip": "i", "pid": 7}


def test_journal_of_earlier_release_is_read_and_continued(tmp_path: Path):
    """Segments of releases without a state file."""
    spec = to_document(plan(tmp_path).spec)
    began = {"kind": "begun", "spec": spec, "working_dir": "/w", "by_value": False}
    counted = {"seconds": {"productive": 60.0}}
    moved = {"kind": "moved", "state": "running", "generation": 3, "world_size": 2, "step": 40}
    fault = {"kind": "fault", "cause": "lost", "rank": 1, "step": 41, "generation": 3, "detail": ""}
    first = [
        began | {"adopted": False, "run": "1"},
        moved | {"counted": counted},
        fault | {"worker": WORKER_FIELDS},
    ]
    second = [began | {"adopted": True, "run": "2"}, {"kind": "step", "step": 75}]
    folder = tmp_path / "journal"
    folder.mkdir()
    for number, entries in enumerate((first, second), 1):
        lines = "".join(json.dumps({"at_s": 10.0 * number, **entry}) + "\n" for entry in entries)
        (folder / f"{number:06d}-0123abcd.jsonl").write_text(lines)
    assert has_journal(str(tmp_path))
    history = read_journal(str(tmp_path))
    assert (history.step, history.generation, history.adoptions) == (75, 3, 1)
    assert [fault.cause for fault in history.faults] == ["lost"]
    updates: list[JournalUpdate] = []
    events = EventBus(history)
    JournalWriter(updates.append, events)
    events.emit(StepRecord(80, 2, 3, None, 0.0, 0.5, {}))
    JournalFiles(str(tmp_path)).write(updates)
    continued = read_journal(str(tmp_path))
    assert (continued.step, continued.run) == (80, "2")
    assert continued.counters.seconds == history.counters.seconds == {"productive": 60.0}


def test_journal_is_state_file_and_event_list(tmp_path: Path):
    updates: list[JournalUpdate] = []
    events = start_journal(tmp_path, updates.append, count(1000.0, 10.0).__next__)
    files = JournalFiles(str(tmp_path))
    for step in range(0, 3000, 10):
        events.emit(StepRecord(step, 2, 1, None, 0.0, 0.5, {}))
        files.write(updates)
        updates.clear()
    events.emit(running(1, 5000))
    events.emit(StepRecord(5002, 2, 1, None, 0.0, 0.5, {}))
    files.write(updates)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "job", "job.json"]
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["begun", "moved"]
    history = read_journal(str(tmp_path))
    assert (history.step, history.working_dir) == (5002, "/w")
    assert read_journal(str(tmp_path / "other")) is None
    assert not has_journal(str(tmp_path / "other"))


def test_event_list_is_bounded(tmp_path: Path):
    updates: list[JournalUpdate] = []
    events = start_journal(tmp_path, updates.append)
    for generation in range(1, 60):
        events.emit(running(generation, 1))
        JournalFiles(str(tmp_path), max_events_bytes=1000).write(updates)
        updates.clear()
    assert (tmp_path / "events.jsonl").stat().st_size < 1500
    assert (tmp_path / "events.jsonl.1").stat().st_size < 1500


def test_journal_is_not_written_without_lease(tmp_path: Path):
    def fence() -> None:
        raise LeaseLostError("lost")

    updates: list[JournalUpdate] = []
    start_journal(tmp_path, updates.append)
    with pytest.raises(LeaseLostError):
        JournalFiles(str(tmp_path), fence).write(updates)
    assert not has_journal(str(tmp_path))


async def test_hanging_disk_does_not_block_controller(folder: Path):
    """The job recovers from a lost worker while all of its writes hang."""
    disk_recovered = threading.Event()
    hanging = threading.Event()

    def write(updates: Sequence[JournalUpdate]) -> None:
        hanging.set()
        disk_recovered.wait(60)

    writer = BackgroundWriter(lambda _: None)
    queue = writer.add_queue("the journal", write, 0.0)
    harness = await Harness(folder, put=queue.put, workers=(1, 2)).trained(3)
    assert hanging.wait(10)
    await harness.kill(1, wait_s=1)
    await harness.steps(2)
    assert len(harness.log.of(Repaired)) == 1
    await harness.finish()
    assert not queue.is_empty
    disk_recovered.set()
    assert writer.close(10)


def test_secrets_are_redacted():
    spec = {
        "args": {"hf_token": "abc", "tokenizer": "gpt2", "pad_token": "<pad>", "n_tokens": 7},
        "checkpoint": {"path": "s3://me:pass@bucket/runs?secret_key=xyz&region=a"},
        "env": {"AWS_SECRET_ACCESS_KEY": "abc", "apiKey": "abc", "list": ["http://u:abc@h/"]},
    }
    redacted = redact_document(spec)
    text = json.dumps(redacted)
    assert not {"abc", "xyz", "pass"} & {*text.replace('"', " ").replace("@", " ").split()}
    assert "xyz" not in text
    assert redacted["args"] | {"hf_token": "abc"} == spec["args"]
    assert set(redacted_keys(redacted)) == set(
        ("args.hf_token checkpoint.path env.AWS_SECRET_ACCESS_KEY env.apiKey env.list").split()
    )
    text = "see https://u:p@h/x and s3://b/k"
    assert redact_url(text) == text.replace("u:p", REDACTED)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"entrypoint": "m:g"}, 'entrypoint: "m:f" -> "m:g"'),
        ({"args": {"layers": 3}}, "args.layers: (none) -> 3"),
        ({"engine": ENGINE | {"train_batch_size": 24}}, "engine.train_batch_size: 12 -> 24"),
    ],
)
def test_job_with_other_training_cannot_adopt_run(
    tmp_path: Path, changes: dict[str, Any], key: str
):
    history = begun_facts(tmp_path, engine=ENGINE)
    error = why_not_adoptable(history, plan(tmp_path, **{"engine": ENGINE, **changes}).spec)
    assert error is not None
    assert f"    {key}" in str(error)
    assert "rayzero stop job" in str(error)


def test_job_with_other_resources_can_adopt_run(tmp_path: Path):
    history = begun_facts(tmp_path, engine=ENGINE)
    engine = ENGINE | {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}
    changes = {
        "engine": engine,
        "workers": {"min": 1, "max": 3},
        "steps": 50,
        "recovery": {"replicas": 0},
        "checkpoint": {"every_steps": 5, "keep": 1},
    }
    assert why_not_adoptable(history, plan(tmp_path, **changes).spec) is None


LEAF = st.integers() | st.text(max_size=3) | st.booleans()
TREES = st.recursive(
    LEAF, lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
)
DOCUMENTS = st.dictionaries(st.sampled_from(["workers", "engine", "seed"]), TREES, max_size=3)


@given(DOCUMENTS, DOCUMENTS)
def test_diff_is_symmetric(old: dict[str, Any], new: dict[str, Any]):
    forward, backward = diff_documents(old, new), diff_documents(new, old)
    assert list(forward) == list(backward)
    for key, line in forward.items():
        before, after = line.removeprefix(f"{key}: ").split(" -> ")
        assert backward[key] == f"{key}: {after} -> {before}"
    assert diff_documents(old, old) == {}
    uncovered = not_covered_by(forward, ADOPTABLE_KEYS)
    assert not [line for line in uncovered if line.startswith("workers")]


def test_faults_keep_their_age(tmp_path: Path):
    killed = replace(FAULT.fault, detail="it was killed\nand more")
    facts = reread(begun_facts(tmp_path).apply(FaultRecorded(killed), 1000.0))
    (fault,) = facts.faults_on_clock(now_s=50.0, unix_s=1030.0)
    assert (fault.at_s, fault.detail, fault.worker.pid) == (20.0, "it was killed", 7)


def test_run_whose_numbers_are_not_finite_is_read_back(tmp_path: Path):
    record = StepRecord(1, 2, 1, math.nan, math.inf, math.inf, {"step_samples": math.nan})
    facts = reread(begun_facts(tmp_path).apply(record, 1001.0))
    assert (facts.step, facts.counters.loss, facts.counters.nonfinite) == (1, None, 1)


async def test_adopted_run_keeps_generation_and_fault_budget(folder: Path):
    past, now_s = begun_facts(folder, time.time()), time.time()
    for generation in (4, 5):
        lost = FaultRecorded(replace(FAULT.fault, generation=generation))
        past = past.apply(lost, now_s)
    past = past.apply(running(5, 40), now_s).apply(Checkpointed(42, "f", 1, 0.1, 0.0), now_s)
    harness = await Harness(folder, past=reread(past), recovery={"max_faults": 2}).trained(2)
    status = harness.controller.status()
    assert (status.generation, status.faults) == (1001, {"lost": 2})
    assert harness.telemetry.snapshot()["generation"] == 1001
    await harness.kill(1, wait_s=5)
    await harness.fails(Exception, "was lost")


async def test_journal_is_read_back_and_page_entries_continue_in_adopted_run(folder: Path):
    harness = await Harness(folder, workers=(1, 2), unix=lambda: 1e9).trained(3)
    await harness.kill(1, wait_s=1)
    await harness.steps(2)
    await harness.clock.advance(5)
    await harness.steps(2)
    for step in (3, 4):
        harness.events.emit(Checkpointed(step, "f", 7, 0.5, 0.0))
    harness.events.emit(CheckpointsPruned((3,)))
    before = harness.telemetry.snapshot()
    harness.run.cancel()
    await settle()
    past = reread(harness.journal[-1].facts)
    assert past == reread(past)
    assert (past.end_state, past.generation) == ("", 2)
    assert past.step == harness.controller.status().step
    adopted = Harness(folder, past=past, workers=(1, 2))
    after = adopted.telemetry.snapshot()
    assert [entry["world_size"] for entry in before["generations"]][:3] == [2, 1, 1]
    lost = after["generations"].pop()  # the ranks ended with their controller
    assert lost["world_size"] == 0
    assert [entry["step"] for entry in after["checkpoints"]] == [4]
    for key in ("generations", "faults", "recoveries", "checkpoints"):
        assert len(before[key]) > 0, key
        assert after[key] == before[key], key
    await adopted.steps(1)
    entries = adopted.telemetry.snapshot()["generations"]
    generations = [entry["generation"] for entry in entries]
    assert generations == sorted(generations)
    assert generations[-1] > max(entry["generation"] for entry in before["generations"])
    adopted.run.cancel()
    await settle()


def test_state_of_earlier_release_has_its_lists(tmp_path: Path):
    """A state file whose lists are entries, with those of a later version."""
    at_s = count(1001.0).__next__
    moved = {"kind": "moved", "state": "running", "world_size": 2, "step": 1}
    generations = [{**moved, "generation": n, "at_s": at_s()} for n in (1, 2)]
    fault = {"kind": "fault", "cause": "lost", "worker": WORKER_FIELDS, "rank": 1, "step": 5}
    fault |= {"generation": 2, "detail": "", "at_s": at_s()}
    repaired = {"kind": "repaired", "cause": "lost", "lost": ["rank 1"], "step": 4, "total_s": 1.0}
    repaired |= {"steps_redone": 1, "world_size_before": 2, "world_size": 1, "seconds": {"load": 1}}
    entries = {
        "moved": [*generations, {"at_s": at_s(), "kind": "moved", "reason": "?"}],
        "repaired": [{"at_s": at_s(), **repaired}],
        "checkpoint": [{"at_s": at_s(), "step": 4, "folder": "f", "nbytes": 7, "seconds": 0.5}],
        "of a later version": [{"at_s": at_s(), "kind": "of a later version"}],
    }
    entries["checkpoint"][0] |= {"kind": "checkpoint", "stopped_s": 0.0}
    state = json.loads(facts_json(begun_facts(tmp_path)))
    for name in ("generations", "seen_faults", "recoveries", "checkpoints", "faults", "lost_ranks"):
        del state[name]
    counters = {"seconds": {"productive": 60.0}, "done": 11, "tokens": 7.0, "loss": None}
    state |= {"entries": entries, "fault_entries": [fault], "counters": counters}
    (tmp_path / "job.json").write_text(json.dumps(state))
    facts = read_journal(str(tmp_path))
    assert (facts.counters.done, facts.counters.seconds) == (11, {"productive": 60.0})
    assert [(it.generation, it.world_size) for it in facts.generations] == [(1, 2), (2, 2), (2, 1)]
    (seen,) = facts.seen_faults
    assert seen.text.startswith("rank 1 on node n (pid 7) was")
    assert ([it.cause for it in facts.faults], facts.faults_by_cause) == (["lost"], {"lost": 1})
    assert [(it.kind, it.total_s) for it in facts.recoveries] == [("repair", 1.0)]
    assert [(it.step, it.bytes) for it in facts.checkpoints] == [(4, 7)]
    assert reread(facts) == facts


async def test_clock_that_was_set_back_makes_no_negative_times(folder: Path):
    later_s = time.time() + 3600
    past = begun_facts(folder, later_s).apply(FAULT, later_s).apply(running(1, 12), later_s)
    assert [fault.at_s for fault in past.faults_on_clock(50.0, time.time())] == [50.0]
    harness = await Harness(folder, past=reread(past)).trained(2)
    assert (await harness.finish()).metrics["seconds"] >= 0


async def test_counters_continue_in_adopted_run(folder: Path):
    """Over three processes: sums, and the wall time since the first one started."""
    start_s = time.time() - 500
    past = begun_facts(folder, start_s)
    for event in (
        FAULT,
        Repaired("lost", ("rank 1",), 9, 0, 2, 2, {"load": 1.0}),
        Checkpointed(10, "f", 1, 0.1, 0.0),
        CheckpointFailed(12, "full", 1, None),
        running(1, 12),
    ):
        past = past.apply(event, start_s + 100)
    seconds = {"productive": 60.0, "starting": 30.0}
    past = replace(past, counters=Counters(seconds=seconds, done=11, tokens=7.0))
    harness = Harness(folder, past=reread(past))  # without a checkpoint
    assert harness.controller.status().step == 12
    await harness.steps(2)
    snapshot = harness.telemetry.snapshot()
    goodput = snapshot["goodput"]
    assert goodput["seconds"]["adoption"] == pytest.approx(410, abs=5)
    assert goodput["wall_s"] == pytest.approx(500, abs=5)
    assert sum(goodput["seconds"].values()) + goodput["unattributed_s"] == pytest.approx(
        goodput["wall_s"]
    )
    assert snapshot["steps_redone"] == 12
    (warning,) = harness.log.of(JobWarning)
    assert "going back to the beginning" in warning.text
    assert "12 finished steps will be done again" in warning.text
    assert snapshot["began_s"] == pytest.approx(start_s)
    series = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in harness.telemetry.collect()
        for sample in family.samples
    }
    assert series["rayzero_faults_total", "job", "lost"] == 1
    assert series["rayzero_repairs_total", "job", "lost"] == 1
    assert series["rayzero_checkpoints_total", "job"] == 1
    assert series["rayzero_checkpoint_failures_total", "job"] == 1
    assert series["rayzero_steps_total", "job"] == 13
    harness.events.emit(running(2, 2))
    history = reread(harness.journal[-1].facts)
    assert (history.step, history.best_step) == (2, 12)
    assert history.counters.seconds["productive"] >= 60.0
    result = await harness.finish()
    assert result.metrics["steps_redone"] == 12
    assert result.metrics["checkpoints"]["failed"] == 1
