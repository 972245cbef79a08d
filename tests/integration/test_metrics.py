"""A real job's numbers, scraped over HTTP while it runs and loses a worker."""

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
STEPS = 1_000_000  # it goes on for as long as it is looked at
# Of a job on CPUs without tokens: nobody knows a peak, and it wants no checkpoint and no resize.
ABSENT = {
    "rayzero_model_flops_utilization_ratio",
    "rayzero_device_peak_memory_bytes",
    "rayzero_checkpoint_step",
    "rayzero_checkpoint_timestamp_seconds",
    "rayzero_checkpoint_unprotected_since_timestamp_seconds",
    "rayzero_checkpoint_bytes",
}


def test_a_running_job_is_scraped(head: Head, tmp_path: Path):
    ray.init(address=head.address, log_to_driver=False)
    try:
        scrape_a_job(tmp_path)
    finally:
        ray.shutdown()


def scrape_a_job(folder: Path) -> None:
    notebook = EventLog()
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
    handle = job.submit(observer=notebook)
    try:
        wait(lambda: whole_again(notebook), handle)
        (serving,) = notebook.of(MetricsServed)
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


def whole_again(notebook: EventLog) -> bool:
    """After the fault, and with a worker in the dead one's place."""
    records = notebook.of(StepRecord)
    return bool(
        notebook.of(MetricsServed)
        and notebook.of(Resized)
        and records[-1].step >= 40
        and records[-1].world_size == 2
    )


def check_series(text: str) -> None:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["job"] == "scraped"
            key = tuple(sorted(item for item in sample.labels.items() if item[0] != "job"))
            found[sample.name, key] = sample.value
        series = family.name + "_total" * (family.type == "counter")
        assert CATALOG[series].kind == family.type
    names = {name for name, _ in found}
    for name, series in CATALOG.items():
        told = f"{name}_count" if series.kind == "histogram" else name
        assert (told in names) != (name in ABSENT), name
    assert found["rayzero_step", ()] >= 40
    assert found["rayzero_faults_total", (("cause", "lost"),)] == 1
    assert found["rayzero_samples_total", ()] == 12 * found["rayzero_steps_total", ()]
    assert found["rayzero_recovery_seconds_count", ()] == 1
    assert 0 < found["rayzero_goodput_ratio", ()] < 1
    began = found["rayzero_start_timestamp_seconds", ()]
    booked = sum(value for (name, _), value in found.items() if "time_seconds_total" in name)
    wall = booked + found["rayzero_time_unattributed_seconds", ()]
    assert abs(time.time() - began - wall) < 30  # the scrape was a moment ago


def check_snapshot(value: dict[str, Any]) -> None:
    assert (value["job"], value["state"]) == ("scraped", "running")
    assert value["progress"]["steps"] == STEPS
    assert all(rank["phase"] for rank in value["ranks"])
    assert len(value["ranks"]) == value["world_size"]
    assert value["replicas"]["step"] is not None


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return bytes(answer.read())


def wait(so: Callable[[], bool], handle: Any, limit_s: float = 300.0) -> None:
    until = time.monotonic() + limit_s
    while not so():
        if handle.wait(0.1):
            handle.result()
            raise AssertionError("the job ended too early")
        assert time.monotonic() < until
