"""What Prometheus is told, read back with the parser of its own client, and by promtool."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from rayzero.orchestrator.job_events import Checkpointed, ReplicationChanged, StepReplicated
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.catalog import CATALOG, job_families, rank_families
from rayzero.orchestrator.metrics.goodput import PHASE_CATEGORY, TimeCategory
from rayzero.orchestrator.metrics.job_metrics import MAX_USER_METRICS, STEP_PHASES
from rayzero.orchestrator.policies.failure import FaultCause
from rayzero.orchestrator.spec import CheckpointSpec
from tests.orchestrator.metrics.jobs import UNIX, Life, lived

Labels = tuple[tuple[str, str], ...]


class Collected(Collector):
    def __init__(self, life: Life) -> None:
        self._life = life

    def collect(self) -> Iterator[Metric]:
        tally = self._life.tally
        yield from job_families(tally)
        yield from rank_families(tally.spec.name, tally.ranks.copy())


def text_of(life: Life) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected(life))
    return generate_latest(registry).decode()


def samples(life: Life) -> dict[tuple[str, Labels], float]:
    """Every sample by its name and its labels but `job`."""
    found = {}
    for family in text_string_to_metric_families(text_of(life)):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("job") == "gpt"
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def one(life: Life, name: str, /, **labels: str) -> float:
    return samples(life)[name, tuple(sorted(labels.items()))]


def test_every_series_of_the_catalog_is_told_as_the_catalog_says():
    told = {}
    for family in text_string_to_metric_families(text_of(lived())):
        name = family.name + "_total" * (family.type == "counter")
        told[name] = family
    assert set(told) == set(CATALOG)
    for name, family in told.items():
        series = CATALOG[name]
        assert (family.type, family.documentation) == (series.kind, series.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {"job", *series.labels}


def test_the_numbers_are_those_of_the_job():
    life = lived()
    assert one(life, "rayzero_state", state="running") == 1
    assert one(life, "rayzero_state", state="failed") == 0
    assert one(life, "rayzero_start_timestamp_seconds") == UNIX + 100
    assert one(life, "rayzero_step") == 3
    assert one(life, "rayzero_steps_total") == 4
    assert one(life, "rayzero_tokens_total") == 4 * 256
    assert one(life, "rayzero_samples_total") == 4 * 8
    assert one(life, "rayzero_skipped_steps_total") == 4
    assert one(life, "rayzero_nonfinite_losses_total") == 1
    assert one(life, "rayzero_loss") != one(life, "rayzero_loss")  # nan
    assert one(life, "rayzero_remaining_seconds") == pytest.approx(97 * 0.5)
    assert one(life, "rayzero_step_seconds_bucket", le="0.5") == 4
    assert one(life, "rayzero_step_seconds_bucket", le="0.25") == 0
    assert one(life, "rayzero_step_phase_seconds_sum", phase="forward") == 1.0
    assert one(life, "rayzero_faults_total", cause="lost") == 1
    assert one(life, "rayzero_faults_in_window") == 1
    assert one(life, "rayzero_steps_redone_total") == 1
    assert one(life, "rayzero_recovery_seconds_sum") == 1.5
    assert one(life, "rayzero_recovery_phase_seconds_sum", phase="load") == 1.0
    assert one(life, "rayzero_checkpoint_bytes") == 3000
    assert one(life, "rayzero_checkpoint_failures_total") == 1
    assert one(life, "rayzero_replica_step", place="node") == 3
    assert one(life, "rayzero_replica_bytes", place="node") == 2048
    assert one(life, "rayzero_replica_timestamp_seconds", place="node") == UNIX + life.now_s
    assert one(life, "rayzero_user_value", name="accuracy") == 0.75


def test_traffic_is_added_up_over_ranks_and_engines():
    """Two ranks of 200 bytes, then an engine of one rank that had sent 200, then one of 300."""
    assert one(lived(), "rayzero_communication_bytes_total", collective="all_gather") == 900
    assert one(lived(), "rayzero_communication_calls_total", collective="all_gather") == 27


def test_the_causes_of_time_and_what_is_pending_are_the_wall_time():
    life = lived()
    life.now_s += 0.5
    found = samples(life)
    causes = [v for (name, _), v in found.items() if name == "rayzero_time_seconds_total"]
    pending = found["rayzero_time_unattributed_seconds", ()]
    assert len(causes) == len(TimeCategory)
    assert sum(causes) + pending == pytest.approx(life.now_s - 100)
    assert pending == 0.5
    productive = one(life, "rayzero_time_seconds_total", cause="productive")
    assert found["rayzero_goodput_ratio", ()] == pytest.approx(productive / (life.now_s - 100))


def ranks(life: Life) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, labels in samples(life):
        if "rank" in dict(labels):
            found.setdefault(name, set()).add(dict(labels)["rank"])
    return found


def test_a_ranks_series_go_with_the_rank():
    life = Life()
    life.form(1, 3, 0)
    life.step(1, 1, 3)
    before = ranks(life)
    assert len(before) == 9
    assert all(one == {"0", "1", "2"} for one in before.values())
    life.enter(State.RECOVERING, 1, 3)
    life.form(2, 2, 1)
    assert ranks(life) == {name: {"0", "1"} for name in before}


def test_what_a_job_does_not_report_is_left_out():
    life = Life()
    names = {name for name, _ in samples(life)}
    assert "rayzero_loss" not in names
    assert "rayzero_replica_timestamp_seconds" not in names
    assert {"rayzero_step", "rayzero_goodput_ratio"} <= names


def test_what_counts_by_a_fixed_label_begins_at_zero():
    """Or the first of each would be missing from every rate and increase."""
    found = samples(Life())
    fixed = {
        "rayzero_faults_total": ("cause", {str(one) for one in FaultCause}),
        "rayzero_repairs_total": ("cause", {str(one) for one in FaultCause}),
        "rayzero_time_seconds_total": ("cause", {str(one) for one in TimeCategory}),
        "rayzero_recovery_phase_seconds_count": ("phase", set(PHASE_CATEGORY)),
        "rayzero_step_phase_seconds_count": ("phase", set(STEP_PHASES)),
    }
    for name, (label, values) in fixed.items():
        told = {dict(labels)[label]: value for (one, labels), value in found.items() if one == name}
        assert told == dict.fromkeys(values, 0.0), name
    counters = {name for name, one in CATALOG.items() if one.kind == "counter" and not one.labels}
    assert {name for name, _ in found} >= counters


def test_copies_on_other_nodes_are_told_apart():
    life = Life()
    life.form(1, 2, 0)
    for step in (1, 2, 3):
        life.now_s += 10
        life.step(step, 1, 2)
    owed = "rayzero_replica_unprotected_since_timestamp_seconds"
    assert ("rayzero_replica_step", (("place", "other"),)) not in samples(life)
    assert one(life, owed, place="node") == UNIX + 130
    assert one(life, owed, place="other") == UNIX + 110  # the first step, which is nowhere else
    life.now_s += 1
    life.see(StepReplicated(2, 4096))
    assert one(life, "rayzero_replica_step", place="other") == 2
    assert one(life, "rayzero_replica_timestamp_seconds", place="other") == UNIX + 120
    assert one(life, owed, place="other") == UNIX + 120
    assert one(life, "rayzero_replica_bytes", place="other") == 4096
    life.see(ReplicationChanged(False))  # one node is left
    assert not [labels for _, labels in samples(life) if ("place", "other") in labels]


def test_a_checkpoint_is_owed_from_the_first_step_on():
    life, owed = Life(), "rayzero_checkpoint_unprotected_since_timestamp_seconds"
    life.form(1, 1, 0)
    assert (owed, ()) not in samples(life)
    for step in (1, 2):
        life.now_s += 10
        life.step(step, 1, 1)
    assert one(life, owed) == UNIX + 110
    life.see(Checkpointed(2, "runs/gpt/step-2", 3000, 0.75, 0.01))
    assert one(life, owed) == UNIX + 120
    life = Life(checkpoint=CheckpointSpec())
    life.form(1, 1, 0)
    life.step(1, 1, 1)
    assert (owed, ()) not in samples(life)


def test_a_users_gauges_are_bounded_in_number():
    life = Life()
    life.form(1, 1, 0)
    life.step(1, 1, 1, **{f"of_step_{number}": 1.0 for number in range(MAX_USER_METRICS + 5)})
    life.step(2, 1, 1, of_step_1=2.0)
    told = [labels for name, labels in samples(life) if name == "rayzero_user_value"]
    assert len(told) == MAX_USER_METRICS
    assert one(life, "rayzero_user_value", name="of_step_1") == 2.0
    assert one(life, "rayzero_user_value", name="of_step_2") == 1.0  # as it was last reported
    assert one(life, "rayzero_user_metrics_dropped_total") == 6


def test_the_budget_of_faults_recovers_with_time():
    life = lived()
    life.now_s += 4000
    assert one(life, "rayzero_faults_in_window") == 0
    assert one(life, "rayzero_faults_total", cause="lost") == 1


def test_promtool_finds_nothing_to_say():
    promtool = os.environ.get("RAYZERO_PROMTOOL") or shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (RAYZERO_PROMTOOL)")
    command = [promtool, "check", "metrics"]
    done = subprocess.run(
        command, input=text_of(lived()), capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
