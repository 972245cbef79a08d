"""The journal: what is written, what is read again, and what is never written."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.redact import REDACTED, redact_document, redact_url, redacted_keys
from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.orchestrator.job.lease import LeaseLostError
from rayzero.orchestrator.job_events import Checkpointed, CheckpointFailed, FaultDetected, Repaired
from rayzero.orchestrator.job_file import (
    ADOPTABLE_KEYS,
    diff_documents,
    not_covered_by,
    to_document,
)
from rayzero.orchestrator.journal import files as files_module
from rayzero.orchestrator.journal.files import (
    JournalFiles,
    JournalUpdate,
    has_journal,
    read_journal,
)
from rayzero.orchestrator.journal.run_history import (
    MAX_ENTRIES,
    RunHistory,
    faults_on_clock,
    fold_entries,
    why_not_adoptable,
)
from rayzero.orchestrator.journal.writer import DEFAULT_STEP_INTERVAL_S, JournalWriter
from rayzero.orchestrator.metrics.job_metrics import JobMetrics, Timestamps
from rayzero.orchestrator.metrics.snapshot import restore_metrics
from tests.orchestrator.support import Harness, async_test, plan, settle

ENGINE = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def begun(
    folder: Path,
    now_s: Callable[[], float] = time.time,
    put: Callable[[JournalUpdate], None] = lambda _: None,
    **changes: Any,
) -> JournalWriter:
    journal = JournalWriter(put, now_s=now_s)
    journal.append(
        "begun",
        run="1",
        adopted=False,
        spec=to_document(plan(folder, **changes).spec),
        working_dir="/w",
        by_value=False,
    )
    return journal


def known(journal: JournalWriter) -> RunHistory:
    """As another process reads it."""
    assert journal.history is not None
    history = RunHistory.from_json(journal.history.to_json())
    assert history is not None
    return history


@async_test
async def test_a_journal_is_read_back(folder: Path):
    chronicle = begun(folder, count(200.0, DEFAULT_STEP_INTERVAL_S).__next__)
    harness = Harness(folder, journal=chronicle, workers={"min": 1, "max": 2})
    await harness.steps(3)
    harness.cluster.kill(1)
    await harness.clock.advance(1)
    await harness.steps(2)
    past = known(chronicle)
    (seen,) = harness.log.of(FaultDetected)
    (repaired,) = harness.log.of(Repaired)
    assert (past.state, past.end_state) == ("running", "")
    assert (past.generation, past.step) == (2, harness.controller.status().step)
    assert [(one.cause, one.rank, one.worker) for one in past.faults] == [
        (seen.cause, seen.rank, seen.worker)
    ]
    assert (past.repairs_by_cause, past.steps_redone) == ({"lost": 1}, repaired.steps_redone)
    harness.run.cancel()
    await settle()


@given(st.data())
def test_a_torn_journal_of_earlier_releases_is_read_up_to_the_tear(data: st.DataObject):
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
def test_a_file_that_is_no_state_is_no_run(tmp_path: Path, content: bytes):
    (tmp_path / "job.json").write_bytes(content)
    assert read_journal(str(tmp_path)) is None


def test_a_journal_of_an_earlier_release_is_read_and_continued(tmp_path: Path):
    """Segments as rayzero wrote them before there was a state file."""
    spec = to_document(plan(tmp_path).spec)
    worker = {"index": 1, "node_id": "n", "node": "n", "ip": "i", "pid": 7}
    first = [
        {
            "kind": "begun",
            "adopted": False,
            "run": "1",
            "spec": spec,
            "working_dir": "/w",
            "by_value": False,
        },
        {
            "kind": "moved",
            "state": "running",
            "generation": 3,
            "world_size": 2,
            "step": 40,
            "counted": {"seconds": {"productive": 60.0}},
        },
        {
            "kind": "fault",
            "cause": "lost",
            "worker": worker,
            "rank": 1,
            "step": 41,
            "generation": 3,
            "detail": "",
        },
    ]
    second = [
        {
            "kind": "begun",
            "adopted": True,
            "run": "2",
            "spec": spec,
            "working_dir": "/w",
            "by_value": False,
        },
        {"kind": "step", "step": 75},
    ]
    folder = tmp_path / "journal"
    folder.mkdir()
    for number, entries in enumerate((first, second), 1):
        lines = "".join(json.dumps({"at_s": 10.0 * number, **entry}) + "\n" for entry in entries)
        (folder / f"{number:06d}-0123abcd.jsonl").write_text(lines)
    assert has_journal(str(tmp_path))
    history = read_journal(str(tmp_path))
    assert history is not None
    assert (history.step, history.generation, history.adoptions) == (75, 3, 1)
    assert [fault.cause for fault in history.faults] == ["lost"]
    updates: list[JournalUpdate] = []
    JournalWriter(updates.append, history).append("step", step=80)
    JournalFiles(str(tmp_path)).write(updates)
    continued = read_journal(str(tmp_path))
    assert continued is not None
    assert (continued.step, continued.run, continued.counters) == (80, "2", history.counters)


def test_a_journal_is_one_state_file_and_a_list_of_events(tmp_path: Path):
    updates: list[JournalUpdate] = []
    journal = begun(tmp_path, put=updates.append)
    files = JournalFiles(str(tmp_path))
    for step in range(0, 3000, 10):
        journal.append("step", step=step)
        files.write(updates)
        updates.clear()
    journal.append("moved", state="running", event="e", generation=1, world_size=2, step=5000)
    journal.append("step", step=5002)
    files.write(updates)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "job", "job.json"]
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["begun", "moved"]
    history = read_journal(str(tmp_path))
    assert history is not None
    assert (history.step, history.working_dir) == (5002, "/w")
    assert read_journal(str(tmp_path / "other")) is None
    assert not has_journal(str(tmp_path / "other"))


def test_the_list_of_events_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files_module, "MAX_EVENTS_BYTES", 1000)
    updates: list[JournalUpdate] = []
    journal = begun(tmp_path, put=updates.append)
    for generation in range(1, 60):
        journal.append(
            "moved", state="running", event="e", generation=generation, world_size=2, step=1
        )
        JournalFiles(str(tmp_path)).write(updates)
        updates.clear()
    assert (tmp_path / "events.jsonl").stat().st_size < 1500
    assert (tmp_path / "events.jsonl.1").stat().st_size < 1500


def test_a_folder_that_another_process_owns_is_not_written(tmp_path: Path):
    def fence() -> None:
        raise LeaseLostError("lost")

    updates: list[JournalUpdate] = []
    begun(tmp_path, put=updates.append)
    with pytest.raises(LeaseLostError):
        JournalFiles(str(tmp_path), fence).write(updates)
    assert not has_journal(str(tmp_path))


@async_test
async def test_a_hung_disk_does_not_stop_the_controller(folder: Path):
    """All writes of the job hang while a worker dies: the job recovers and continues."""
    disk = threading.Event()
    hung = threading.Event()

    def write(updates: Sequence[JournalUpdate]) -> None:
        hung.set()
        disk.wait(60)

    writer = BackgroundWriter(lambda _: None)
    queue = writer.add_queue("the journal", write, 0.0)
    journal = begun(folder, put=queue.put)
    harness = Harness(folder, journal=journal, workers={"min": 1, "max": 2})
    await harness.steps(3)
    assert hung.wait(10)
    harness.cluster.kill(1)
    await harness.clock.advance(1)
    await harness.steps(2)
    assert len(harness.log.of(Repaired)) == 1
    await harness.finish()
    assert not queue.is_empty
    disk.set()
    assert writer.close(10)


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


def test_a_run_is_adopted_with_other_resources(tmp_path: Path):
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
    assert list(there) == list(back)
    for key, line in there.items():
        before, after = line.removeprefix(f"{key}: ").split(" -> ")
        assert back[key] == f"{key}: {after} -> {before}"
    assert diff_documents(old, old) == {}
    assert not [
        line for line in not_covered_by(there, ADOPTABLE_KEYS) if line.startswith("workers")
    ]


def test_faults_keep_their_age(tmp_path: Path):
    chronicle = begun(tmp_path, lambda: 1000.0)
    worker = {"index": 1, "node_id": "n", "node": "n", "ip": "i", "pid": 7}
    found = {"cause": "lost", "worker": worker, "rank": 1, "step": 5, "generation": 1}
    chronicle.append("fault", **found, detail="it was killed")
    (fault,) = faults_on_clock(known(chronicle), now_s=50.0, unix_s=1030.0)
    assert (fault.at_s, fault.detail, fault.worker.pid) == (20.0, "it was killed", 7)


@async_test
async def test_an_adopted_run_keeps_its_numbers_and_its_budget(folder: Path):
    chronicle = begun(folder)
    worker = {"index": 1, "node_id": "n", "node": "n", "ip": "i", "pid": 7}
    for generation in (4, 5):
        found = {"cause": "lost", "worker": worker, "rank": 1, "step": 5, "generation": generation}
        chronicle.append("fault", **found, detail="")
    chronicle.append("moved", state="running", event="e", generation=5, world_size=2, step=40)
    chronicle.on_event(Checkpointed(42, "f", 1, 0.1, 0.0))
    harness = Harness(folder, past=known(chronicle), recovery={"max_faults": 2})
    await harness.steps(2)
    status = harness.controller.status()
    assert (status.generation, status.faults) == (6, {"lost": 2})
    assert harness.telemetry.snapshot()["generation"] == 6
    harness.cluster.kill(1)
    await harness.clock.advance(5)
    with pytest.raises(Exception, match="was lost"):
        await harness.result()


@async_test
async def test_entries_of_the_page_continue_in_an_adopted_run(folder: Path):
    chronicle = begun(folder)
    harness = Harness(folder, journal=chronicle, workers={"min": 1, "max": 2})
    await harness.steps(3)
    harness.cluster.kill(1)
    await harness.clock.advance(1)
    await harness.steps(2)
    await harness.clock.advance(5)
    await harness.steps(2)
    harness.events.emit(Checkpointed(4, "f", 7, 0.5, 0.0))
    before = harness.telemetry.snapshot()
    harness.run.cancel()
    await settle()
    again = Harness(folder, past=known(chronicle), workers={"min": 1, "max": 2})
    after = again.telemetry.snapshot()
    for key in ("generations", "faults", "recoveries", "checkpoints"):
        assert len(before[key]) > 0, key
        assert [untimed(one) for one in after[key]] == [untimed(one) for one in before[key]], key
    await again.steps(1)
    generations = [one["generation"] for one in again.telemetry.snapshot()["generations"]]
    assert generations == sorted(set(generations))
    assert len(generations) == len(before["generations"]) + 1
    again.run.cancel()
    await settle()


def untimed(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "at_s"}


def test_listed_entries_are_bounded_and_unknown_ones_ignored(tmp_path: Path):
    chronicle = begun(tmp_path)
    for generation in range(1, MAX_ENTRIES + 10):
        chronicle.append(
            "moved", state="running", event="e", generation=generation, world_size=2, step=1
        )
    chronicle.append("of a later version", reason="?")
    tally = JobMetrics(plan(tmp_path).spec, None, lambda: Timestamps(0.0, 0.0))
    restore_metrics(tally, known(chronicle))
    assert [one["generation"] for one in tally.history.generations][-1] == MAX_ENTRIES + 9
    assert len(tally.history.generations) == MAX_ENTRIES
    assert not tally.history.recoveries


@async_test
async def test_counters_continue_in_an_adopted_run(folder: Path):
    """From one process to the next and the one after: sums, and the wall time since the first."""
    began_s = time.time() - 500
    now_s = count(began_s, 100).__next__
    chronicle = begun(folder, lambda: min(now_s(), began_s + 100))
    worker = {"index": 1, "node_id": "n", "node": "n", "ip": "i", "pid": 7}
    chronicle.append("fault", cause="lost", worker=worker, rank=1, step=5, generation=1, detail="")
    chronicle.on_event(Repaired("lost", ("rank 1",), 9, 0, 2, 2, {"load": 1.0}))
    chronicle.on_event(Checkpointed(10, "f", 1, 0.1, 0.0))
    chronicle.on_event(CheckpointFailed(12, "full", 1, None))
    counted = {"seconds": {"productive": 60.0, "starting": 30.0}, "done": 11, "tokens": 7.0}
    chronicle.counter_source = lambda: counted
    chronicle.append("moved", state="running", event="e", generation=1, world_size=2, step=12)

    harness = Harness(folder, past=known(chronicle), journal=chronicle)  # there is no checkpoint
    chronicle.counter_source = harness.telemetry.dump_counters
    assert harness.controller.status().step == 12
    await harness.steps(2)
    value = harness.telemetry.snapshot()
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
        for family in harness.telemetry.collect()
        for one in family.samples
    }
    assert series["rayzero_faults_total", "job", "lost"] == 1
    assert series["rayzero_repairs_total", "job", "lost"] == 1
    assert series["rayzero_checkpoints_total", "job"] == 1
    assert series["rayzero_checkpoint_failures_total", "job"] == 1
    assert series["rayzero_steps_total", "job"] == 13
    chronicle.append("moved", state="running", event="e", generation=2, world_size=2, step=2)
    again = known(chronicle)
    assert (
        again.steps_redone,
        again.total_repairs,
        again.checkpoints_written,
        again.checkpoints_failed,
    ) == (12, 1, 1, 1)
    assert (again.step, again.best_step) == (2, 12)
    assert again.counters["seconds"]["productive"] >= 60.0
    assert again.counters["seconds"]["adoption"] == pytest.approx(410, abs=5)
    result = await harness.finish()
    assert result.metrics["steps_redone"] == 12
    assert result.metrics["checkpoints"]["failed"] == 1
