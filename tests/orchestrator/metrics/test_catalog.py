"""The exported metrics, parsed by the Prometheus client and by promtool."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from rayzero.orchestrator.job_events import Checkpointed, StepReplicated
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.catalog import CATALOG, job_families, rank_families
from rayzero.orchestrator.metrics.goodput import PHASE_CATEGORY, TimeCategory
from rayzero.orchestrator.metrics.job_metrics import MAX_USER_METRICS, STEP_PHASES
from rayzero.orchestrator.metrics.rank_metrics import RankMetrics, RankMetricsTable, RankReport
from rayzero.orchestrator.policies.failure import FaultCause
from rayzero.orchestrator.spec import CheckpointSpec
from rayzero.workers.messages import Heartbeat, StepReport
from rayzero.workers.step_rows import combine, combine_beats
from tests.orchestrator.metrics.simulated_job import UNIX, SimulatedJob, eventful_job

Labels = tuple[tuple[str, str], ...]


class JobCollector(Collector):
    def __init__(self, job: SimulatedJob) -> None:
        self._job = job

    def collect(self) -> Iterator[Metric]:
        metrics = self._job.metrics
        yield from job_families(metrics)
        yield from rank_families(metrics.spec.name, metrics.ranks.copy().view())


def metrics_text(job: SimulatedJob) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobCollector(job))
    return generate_latest(registry).decode()


def samples(job: SimulatedJob) -> dict[tuple[str, Labels], float]:
    """Every sample by its name and its labels without `job`."""
    exported = {}
    for family in text_string_to_metric_families(metrics_text(job)):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("job") == "gpt"
            exported[sample.name, tuple(sorted(labels.items()))] = sample.value
    return exported


def test_exported_series_match_catalog():
    families = text_string_to_metric_families(metrics_text(eventful_job()))
    actual = {family.name + "_total" * (family.type == "counter"): family for family in families}
    assert set(actual) == set(CATALOG)
    for name, family in actual.items():
        series = CATALOG[name]
        assert (family.type, family.documentation) == (series.kind, series.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {"job", *series.labels}


VALUES = """
state{state=running} 1
state{state=failed} 0
start_timestamp_seconds 1700000100
step 3
steps_total 4
tokens_total 1024
samples_total 32
skipped_steps_total 4
nonfinite_losses_total 1
loss nan
remaining_seconds 48.5
step_seconds_bucket{le=0.5} 4
step_seconds_bucket{le=0.25} 0
step_phase_seconds_sum{phase=forward} 1
faults_total{cause=lost} 1
faults_in_window 1
steps_redone_total 1
recovery_seconds_sum 1.5
role_workers{role=rollout} 1
role_worker_limits{limit=max,role=rollout} 4
role_faults_total{cause=lost,role=rollout} 1
role_faults_in_window{role=rollout} 1
role_fault_budget{role=rollout} 20
role_value{name=reward,role=rollout} 0.5
role_tokens_total{role=rollout} 256
role_oldest_version{role=rollout} 2
role_weights_wait_seconds_total{role=rollout} 0.5
rollout_tasks{role=rollout,state=leased} 2
rollout_tasks{role=rollout,state=waiting} 5
rollout_ready_prompts 3
rollout_read_prompts 8
rollout_published_version 2
rollout_lag_steps{statistic=mean} 0.5
rollout_max_lag_steps 1
rollout_lease_expiries_total{role=rollout} 1
rollout_task_wait_seconds_total{role=rollout} 7.5
recovery_phase_seconds_sum{phase=load} 1
checkpoint_bytes 3000
checkpoint_failures_total 1
replica_step{place=node} 3
replica_bytes{place=node} 2048
replica_timestamp_seconds{place=node} 1700000112
user_value{name=accuracy} 0.75
process_cpu_cores{rank=0} 1.5
device_utilization_ratio{rank=0} 0.75
communication_bytes_total{collective=all_gather} 900
data_wait_ratio 0.25
stream_samples_total{source=web} 18
stream_samples_total{source=s3://b/code} 6
stream_share_ratio{source=web} 0.75
stream_read_bytes_total{source=web} 3072
stream_read_blocks_total{source=web} 6
stream_block_uses_total{result=hit,source=web} 18
stream_block_uses_total{result=wait,source=s3://b/code} 6
communication_calls_total{collective=all_gather} 27
"""


def test_exported_values_match_job():
    """Traffic is summed over two ranks of 200 bytes each, then one of 200 and 300."""
    job = eventful_job()
    exported = samples(job)
    for line in VALUES.split("\n")[1:-1]:
        name, text, value = re.fullmatch(r"(\w+)(?:{(.*)})? (.*)", line).groups()  # type: ignore[union-attr]
        labels = tuple(tuple(it.split("=")) for it in text.split(",")) if text else ()
        expected = pytest.approx(float(value), rel=1e-12, nan_ok=True)
        assert exported[f"rayzero_{name}", labels] == expected, line
    job.now_s += 4000
    exported = samples(job)
    assert exported["rayzero_faults_in_window", ()] == 0, "the fault budget recovers with time"
    assert exported["rayzero_role_faults_in_window", (("role", "rollout"),)] == 0
    assert exported["rayzero_faults_total", (("cause", "lost"),)] == 1


def test_attributed_and_unattributed_time_sum_to_wall_time():
    job = eventful_job()
    job.now_s += 0.5
    exported = samples(job)
    causes = [v for (name, _), v in exported.items() if name == "rayzero_time_seconds_total"]
    unattributed = exported["rayzero_time_unattributed_seconds", ()]
    assert len(causes) == len(TimeCategory)
    assert sum(causes) + unattributed == pytest.approx(job.now_s - 100)
    assert unattributed == 0.5
    productive = samples(job)["rayzero_time_seconds_total", (("cause", "productive"),)]
    assert exported["rayzero_goodput_ratio", ()] == pytest.approx(productive / (job.now_s - 100))


def ranks(job: SimulatedJob) -> dict[str, set[str]]:
    exported: dict[str, set[str]] = {}
    for name, labels in samples(job):
        if "rank" in dict(labels):
            exported.setdefault(name, set()).add(dict(labels)["rank"])
    return exported


def test_series_of_lost_ranks_are_removed():
    job = SimulatedJob()
    job.form(1, 3, 0)
    job.step(1, 1, 3)
    before = ranks(job)
    assert len(before) == 11
    assert all(exported == {"0", "1", "2"} for exported in before.values())
    job.enter(State.RECOVERING, 1, 3)
    job.form(2, 2, 1)
    assert ranks(job) == {name: {"0", "1"} for name in before}


def test_counters_with_fixed_label_start_at_zero():
    """Otherwise `rate` and `increase` would miss the first of each."""
    exported = samples(SimulatedJob())
    names = {name for name, _ in exported}
    assert not {"rayzero_loss", "rayzero_replica_timestamp_seconds"} & names, "not reported yet"
    faults, times = set(map(str, FaultCause)), set(map(str, TimeCategory))
    for name, label, values in (
        ("rayzero_faults_total", "cause", faults),
        ("rayzero_repairs_total", "cause", faults),
        ("rayzero_time_seconds_total", "cause", times),
        ("rayzero_recovery_phase_seconds_count", "phase", PHASE_CATEGORY),
        ("rayzero_step_phase_seconds_count", "phase", STEP_PHASES),
    ):
        of_name = {dict(it)[label]: v for (other, it), v in exported.items() if other == name}
        assert of_name == dict.fromkeys(values, 0.0), name
    counters = {name for name, row in CATALOG.items() if row.kind == "counter" and not row.labels}
    assert names >= counters


def test_replicas_on_other_nodes_have_their_own_series():
    job = SimulatedJob()
    job.form(1, 2, 0)
    for step in (1, 2, 3):
        job.now_s += 10
        job.step(step, 1, 2)
    unprotected = "rayzero_replica_unprotected_since_timestamp_seconds"
    assert ("rayzero_replica_step", (("place", "other"),)) not in samples(job)
    assert samples(job)[unprotected, (("place", "node"),)] == UNIX + 130
    first_step_s = UNIX + 110  # which no other node has
    assert samples(job)[unprotected, (("place", "other"),)] == first_step_s
    job.now_s += 1
    job.emit(StepReplicated(2, 4096))
    assert samples(job)["rayzero_replica_step", (("place", "other"),)] == 2
    assert samples(job)["rayzero_replica_timestamp_seconds", (("place", "other"),)] == UNIX + 120
    assert samples(job)[unprotected, (("place", "other"),)] == UNIX + 120
    assert samples(job)["rayzero_replica_bytes", (("place", "other"),)] == 4096
    job.form(2, 1, 3)  # one node remains
    job.step(4, 2, 1)
    assert not [labels for _, labels in samples(job) if ("place", "other") in labels]


def test_training_is_unprotected_from_first_step_on():
    job, unprotected = SimulatedJob(), "rayzero_checkpoint_unprotected_since_timestamp_seconds"
    job.form(1, 1, 0)
    assert (unprotected, ()) not in samples(job)
    for step in (1, 2):
        job.now_s += 10
        job.step(step, 1, 1)
    assert samples(job)[unprotected, ()] == UNIX + 110
    job.emit(Checkpointed(2, "runs/gpt/step-2", 3000, 0.75, 0.01))
    assert samples(job)[unprotected, ()] == UNIX + 120
    job = SimulatedJob(checkpoint=CheckpointSpec())
    job.form(1, 1, 0)
    job.step(1, 1, 1)
    names = {name for name, _ in samples(job)}
    unknown = (f"rayzero_checkpoint_{it}" for it in ("step", "timestamp_seconds", "bytes"))
    assert not names & {unprotected, *unknown}


def test_number_of_user_metrics_is_bounded():
    job = SimulatedJob()
    job.form(1, 1, 0)
    job.step(1, 1, 1, **{f"of_step_{number}": 1.0 for number in range(MAX_USER_METRICS + 5)})
    job.step(2, 1, 1, of_step_1=2.0)
    actual = [labels for name, labels in samples(job) if name == "rayzero_user_value"]
    assert len(actual) == MAX_USER_METRICS
    assert samples(job)["rayzero_user_value", (("name", "of_step_1"),)] == 2.0
    last_reported = samples(job)["rayzero_user_value", (("name", "of_step_2"),)]
    assert last_reported == 1.0
    assert samples(job)["rayzero_user_metrics_dropped_total", ()] == 6


def test_promtool_accepts_metrics():
    promtool = os.environ.get("RAYZERO_PROMTOOL") or shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (RAYZERO_PROMTOOL)")
    command = [promtool, "check", "metrics"]
    done = subprocess.run(
        command, input=metrics_text(eventful_job()), capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_copied_ranks_stay_as_they_were():
    """A reader has a copy while the controller counts on."""
    ranks = RankMetricsTable()
    ranks.start_generation(["a", "b"])
    first = StepReport(1, 1, 1, {}, {"exposed_comm_s": 0.5, "collectives/gather/bytes": 8.0})
    rows = combine([7], [first])
    ranks.on_rows(rows)
    copied = ranks.copy()
    seen, traffic = copied.rows, dict(copied.traffic())
    assert seen == [
        (0, RankMetrics(None, None, "a", 0, 0)),
        (1, RankMetrics(RankReport(rows, 0), None, "b", 0.5, 0)),
    ]
    ranks.on_rows(replace(rows, step=2))
    ranks.on_heartbeats(combine_beats([1], [Heartbeat(1, 3, "forward", 0.0)]))
    ranks.start_generation(["c"])
    assert (copied.rows, dict(copied.traffic())) == (seen, traffic)
    assert ranks.rows == [(0, RankMetrics(None, None, "c", 0, 0))]
    assert ranks.traffic() == traffic, "of engines that are gone"
