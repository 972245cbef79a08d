"""Metrics of a real job, scraped over HTTP while it runs and loses a worker."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job_events import MetricsServed, Resized
from rayzero.orchestrator.metrics.catalog import CATALOG
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.spec import Workers
from tests.integration.conftest import Head
from tests.integration.jobs import steady
from tests.orchestrator.support import EventLog

pytestmark = pytest.mark.slow
STEPS = 1_000_000  # effectively endless
# Not reported for a CPU job: peak FLOP/s are unknown, and it has no periodic checkpoints.
ABSENT = {
    "rayzero_model_flops_utilization_ratio",
    "rayzero_device_peak_memory_bytes",
    "rayzero_checkpoint_step",
    "rayzero_checkpoint_timestamp_seconds",
    "rayzero_checkpoint_unprotected_since_timestamp_seconds",
    "rayzero_checkpoint_bytes",
}


def test_running_job_exposes_all_metrics(head: Head, tmp_path: Path):
    ray.init(address=head.address, log_to_driver=False)
    try:
        scrape_a_job(tmp_path)
    finally:
        ray.shutdown()


def scrape_a_job(folder: Path) -> None:
    event_log = EventLog()
    job = Job(
        name="scraped",
        entrypoint=steady.train,
        engine=steady.ENGINE,
        workers=Workers(min=1, max=2),
        steps=STEPS,
        checkpoint={"path": str(folder)},
        metrics={"port": 0, "jsonl": True, "tensorboard": True},
        faults=["kill(rank=1, step=10)"],
    )
    handle = job.submit(observer=event_log)
    try:
        wait_until(lambda: has_recovered(event_log), handle)
        (serving,) = event_log.of(MetricsServed)
        check_series(read(serving.url + "/metrics").decode())
        check_snapshot(json.loads(read(serving.url + "/snapshot.json")))
        handle.stop()
        assert handle.wait(120)
    finally:
        handle.end()
    port = int(serving.url.rsplit(":", 1)[1])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    lines = (folder / "scraped" / "metrics.jsonl").read_text().splitlines()
    steps = sorted({json.loads(line)["step"] for line in lines})
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 40
    (events,) = (folder / "scraped" / "tensorboard").iterdir()
    assert events.stat().st_size > 1000


def has_recovered(event_log: EventLog) -> bool:
    """Whether the lost worker was replaced and the job reached step 40."""
    records = event_log.of(StepRecord)
    return bool(
        event_log.of(MetricsServed)
        and event_log.of(Resized)
        and records[-1].step >= 40
        and records[-1].world_size == 2
    )


def check_series(text: str) -> None:
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["job"] == "scraped"
            key = tuple(sorted(item for item in sample.labels.items() if item[0] != "job"))
            samples[sample.name, key] = sample.value
        series = family.name + "_total" * (family.type == "counter")
        assert CATALOG[series].kind == family.type
    names = {name for name, _ in samples}
    for name, series in CATALOG.items():
        sample_name = f"{name}_count" if series.kind == "histogram" else name
        assert (sample_name in names) != (name in ABSENT), name
    assert samples["rayzero_step", ()] >= 40
    assert samples["rayzero_faults_total", (("cause", "lost"),)] == 1
    assert samples["rayzero_samples_total", ()] == 12 * samples["rayzero_steps_total", ()]
    assert samples["rayzero_recovery_seconds_count", ()] == 1
    assert 0 < samples["rayzero_goodput_ratio", ()] < 1
    start_s = samples["rayzero_start_timestamp_seconds", ()]
    attributed_s = sum(
        value for (name, _), value in samples.items() if "time_seconds_total" in name
    )
    wall_s = attributed_s + samples["rayzero_time_unattributed_seconds", ()]
    assert abs(time.time() - start_s - wall_s) < 30  # the scrape is recent


def check_snapshot(value: dict[str, Any]) -> None:
    assert (value["job"], value["state"]) == ("scraped", "running")
    assert value["progress"]["steps"] == STEPS
    assert all(rank["phase"] for rank in value["ranks"])
    assert len(value["ranks"]) == value["world_size"]
    assert value["replicas"]["step"] is not None


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as response:
        return bytes(response.read())


def wait_until(condition: Callable[[], bool], handle: Any, timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if handle.wait(0.1):
            handle.result()
            raise AssertionError("the job ended too early")
        assert time.monotonic() < deadline
