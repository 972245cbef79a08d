"""Checks of a real job's metrics, scraped over HTTP after it has lost and replaced a worker."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rayzero.orchestrator.job_events import MetricsServed, Repaired
from rayzero.orchestrator.metrics.catalog import CATALOG
from rayzero.orchestrator.progress import StepRecord
from tests.orchestrator.support import EventLog

METRICS = {"port": 0, "jsonl": True, "tensorboard": True}
# Not reported for a CPU job without roles and streams.
ABSENT = {
    "rayzero_model_flops_utilization_ratio",
    "rayzero_device_peak_memory_bytes",
    "rayzero_device_utilization_ratio",
    *(
        name
        for name in CATALOG
        if name.startswith(("rayzero_role_", "rayzero_rollout_", "rayzero_stream_"))
    ),
}


def check_metrics(event_log: EventLog, name: str, steps: int) -> None:
    """Check what a job with these `steps` exposes after `has_recovered`."""
    (serving,) = event_log.of(MetricsServed)
    check_series(read(serving.url + "/metrics").decode(), name)
    check_snapshot(json.loads(read(serving.url + "/snapshot.json")), name, steps)


def files_have_steps(folder: Path) -> bool:
    """Whether the job's files, written asynchronously, have 40 steps without a gap."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = sorted({json.loads(line)["step"] for line in lines})
    assert steps == list(range(1, len(steps) + 1))
    (events,) = (folder / "tensorboard").iterdir()
    return len(steps) >= 40 and events.stat().st_size > 1000


def check_endpoint_is_closed(event_log: EventLog) -> None:
    port = int(event_log.of(MetricsServed)[-1].url.rsplit(":", 1)[1])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def has_recovered(event_log: EventLog) -> bool:
    """Whether the lost worker was replaced and the job reached step 40."""
    records = event_log.of(StepRecord)
    return bool(
        event_log.of(MetricsServed)
        and event_log.of(Repaired)  # its replacement may have come in time for it: not Resized
        and records[-1].step >= 40
        and records[-1].world_size == 2
    )


def check_series(text: str, job: str) -> None:
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["job"] == job
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


def check_snapshot(value: dict[str, Any], job: str, steps: int) -> None:
    assert (value["job"], value["state"]) == (job, "running")
    assert value["progress"]["steps"] == steps
    assert all(rank["phase"] for rank in value["ranks"])
    assert len(value["ranks"]) == value["world_size"]
    assert value["replicas"]["step"] is not None


class Scrape:
    """A job's series at one time."""

    def __init__(self, url: str) -> None:
        lines = read(f"{url}/metrics").decode().splitlines()
        self.at_s = time.monotonic()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        self.values = {series: float(value) for series, _, value in samples}

    def value(self, series: str, **labels: str) -> float:
        """Of the only series with these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        (found,) = [
            value
            for name, value in self.values.items()
            if name.partition("{")[0] == series and all(it in name for it in wanted)
        ]
        return found

    def continued(self, before: Scrape | None = None) -> dict[str, str]:
        """All series for an hour, one sample a minute, for promtool: as if they went on as since
        then, or stayed as they are."""
        per_minute = 0.0 if before is None else 60 / (self.at_s - before.at_s)
        since = (before or self).values
        return {
            series: f"{value:.6f}{(value - since.get(series, value)) * per_minute:+.6f}x60"
            for series, value in self.values.items()
            if isfinite(value)
        }


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as response:
        return bytes(response.read())
