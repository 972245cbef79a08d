"""Telemetry of a simulated job under the real controller."""

from __future__ import annotations

import gzip
import json
import socket
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.curves import MAX_USER_CURVES
from rayzero.orchestrator.metrics.endpoint import json_response
from rayzero.orchestrator.metrics.telemetry import Telemetry
from rayzero.orchestrator.progress import StepRecord
from rayzero.workers.messages import LogLine
from tests.orchestrator.metrics.simulated_job import GAUGES
from tests.orchestrator.support import NO_FILES, Harness, VirtualClock, plan, settle


async def test_telemetry_of_job_with_fault_is_consistent(tmp_path: Path):
    harness = Harness(tmp_path, 3, workers=(1, 3), steps=10)
    await harness.clock.advance(5.0)  # in this simulation only waits take time
    await harness.steps(2)
    await harness.kill(1)
    await harness.clock.advance(2.0)
    await harness.steps(3)
    harness.cluster.send_heartbeat(0, phase="backward", silent_s=1.5)
    harness.cluster.send_heartbeat(1)  # a late heartbeat of a dead worker has no effect
    await settle()
    snapshot = harness.telemetry.snapshot()
    beats = {rank["rank"]: (rank["phase"], rank["silent_s"]) for rank in snapshot["ranks"]}
    assert beats == {0: ("backward", 1.5), 1: (None, None)}
    assert snapshot["ranks"][0]["node"] == "host-a"
    assert (snapshot["state"], snapshot["world_size"]) == ("running", 2)
    assert snapshot["progress"]["step"] == 5
    assert {rank["rank"] for rank in snapshot["ranks"]} == {0, 1}
    assert [item["cause"] for item in snapshot["faults"]] == ["lost"]
    assert [item["kind"] for item in snapshot["recoveries"]] == ["repair"]
    await harness.finish()
    final = harness.telemetry.snapshot()
    assert final["state"] == "succeeded"
    goodput = final["goodput"]
    assert goodput["unattributed_s"] == 0
    assert sum(goodput["seconds"].values()) == pytest.approx(goodput["wall_s"])
    assert goodput["wall_s"] == pytest.approx(harness.clock.now())


def exported(harness: Harness, name: str, label: str) -> dict[str, float]:
    """The samples of a family by a label, without those at 0."""
    (family,) = [it for it in harness.telemetry.collect() if it.name == name]
    return {sample.labels[label]: sample.value for sample in family.samples if sample.value}


async def test_worker_limits_and_faults_are_exported(tmp_path: Path):
    harness = await Harness(tmp_path, workers=(1, 2)).trained(1)
    harness.controller.scale(1, 3)
    await harness.kill(0, wait_s=1)
    assert exported(harness, "rayzero_workers", "limit") == {"min": 1, "max": 3}
    assert exported(harness, "rayzero_faults", "cause") == {"lost": 1}


async def test_fault_that_ends_job_is_counted_once(tmp_path: Path):
    harness = await Harness(tmp_path).started()
    for rank in (0, 1):  # no step was finished: user code that fails now fails the job
        harness.cluster.crash(rank, "user")
    await harness.clock.advance(10.0)
    assert harness.states[-1] is State.FAILED
    assert exported(harness, "rayzero_faults", "cause") == {"user": 1}
    assert harness.telemetry.snapshot()["goodput"]["unattributed_s"] == 0
    assert harness.run.exception() is not None


async def test_replicas_on_other_nodes_are_counted(tmp_path: Path):
    harness = await Harness(tmp_path, "ab", workers=(2, 2), steps=10).trained(2)
    harness.cluster.replicate(1)
    await harness.steps(1)
    assert exported(harness, "rayzero_replica_step", "place")["other"] == 1
    assert harness.telemetry.snapshot()["replicas"]["step_on_other_nodes"] == 1


@pytest.mark.parametrize("enabled", [True, False])
async def test_series_of_ranks_can_be_disabled(tmp_path: Path, enabled: bool):
    harness = await Harness(tmp_path, metrics={"per_rank": enabled}).trained(2)
    harness.cluster.send_heartbeat(0)
    await settle()
    families = {family.name: family for family in harness.telemetry.collect()}
    samples = [sample for family in families.values() for sample in family.samples]
    assert any("rank" in sample.labels for sample in samples) is enabled
    assert families["rayzero_world_size"].samples[0].value == 2
    assert harness.telemetry.snapshot()["ranks"]


def test_endpoint_lives_as_long_as_telemetry(tmp_path: Path):
    metrics = {"port": 0, "jsonl": True, "tensorboard": True}
    job_plan = plan(tmp_path, metrics=metrics)
    writer = BackgroundWriter(print)
    with closing(Telemetry(job_plan, VirtualClock(), writer, EventBus())) as telemetry:
        assert telemetry.url.startswith("http://127.0.0.1:")
        port = int(telemetry.url.rsplit(":", 1)[1])
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    assert writer.close(10)
    names = {path.name for path in job_plan.output_dir.iterdir()}
    assert {"metrics.jsonl", "tensorboard"} <= names


REPORTED = {name: value for name, value in GAUGES.items() if name != "loss"}


def test_history_is_bounded_and_redacted(tmp_path: Path):
    """The limits are those that docs/metrics.md states."""
    args = {"password": "hunter2", "data": "s3://key:hunter2@bucket/x"}
    job_plan = plan(tmp_path, args=args, metrics={"log_lines": 20})
    names, unix = [f"name-{index}" for index in range(60)], count(100).__next__
    events = EventBus(unix=lambda: 100.0)
    with closing(Telemetry(job_plan, VirtualClock(), NO_FILES, events, unix)) as telemetry:
        for step in range(1, 3001):
            gauges = REPORTED | dict.fromkeys(names, step * 1.000123456789)
            events.emit(StepRecord(step, 2, 1, step / 7, 256.0, 0.5, gauges))
            events.emit(LogLine(0, "stdout", "s3://key:hunter2@bucket" + "x" * 900))
        body = json_response(telemetry.history())[1]
    history = json.loads(body)
    assert "hunter2" not in body.decode()
    assert (len(history["log"]), {len(line) for line in history["log"]}) == (20, {500})
    assert history["config"]["args"]["password"] == "***"
    curves = history["curves"]
    assert len([name for name in curves if name.startswith("user/")]) == MAX_USER_CURVES
    assert len(history["names_without_curve"]) == 61 - MAX_USER_CURVES
    assert {"loss", "lr", "grad_norm", "tokens_per_s", "mfu", "step_s", "elapsed_s"} < curves.keys()
    assert {"resident_bytes", "device_peak_bytes", "phases/forward"} < curves.keys()
    assert {"cpu_cores", "gpu_utilization"} < curves.keys()
    assert curves["tokens_per_s"][0] == [1, 512.0, 512.0, 512.0, 0]
    assert curves["samples_per_s"][0] == [1, 16.0, 16.0, 16.0, 0]
    assert curves["elapsed_s"][-1][3] > 2999
    assert max(map(len, curves.values())) <= 512
    assert len(body) < 750_000
    assert len(gzip.compress(body, 3)) < 220_000


def test_no_endpoint_or_file_by_default(tmp_path: Path):
    job_plan = plan(tmp_path)
    with closing(Telemetry(job_plan, VirtualClock(), NO_FILES, EventBus())) as telemetry:
        assert telemetry.url is None
        json.dumps(telemetry.snapshot())
    assert list(job_plan.output_dir.iterdir()) == []


def test_address_or_folder_that_cannot_be_used_is_an_error_and_leaves_no_file(tmp_path: Path):
    job_plan = plan(tmp_path, metrics={"port": 0, "host": "192.0.2.1", "jsonl": True})
    with pytest.raises(ConfigError, match=r"metrics\.host"):
        Telemetry(job_plan, VirtualClock(), NO_FILES, EventBus())
    assert list(job_plan.output_dir.iterdir()) == []
    (job_plan.output_dir / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match="metrics cannot be written"):
        Telemetry(plan(tmp_path, metrics={"jsonl": True}), VirtualClock(), NO_FILES, EventBus())
