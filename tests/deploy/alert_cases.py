"""Test cases for the alerts: series of a job, and whether an alert fires.

Time starts at 0 and a sample is taken each minute. Series are in promtool's notation: `1x60` is a
constant 1 for 60 minutes, `0+2x60` grows by 2 a minute, and `_` is a missing sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Samples = Mapping[str, str]

RUNNING: Samples = {'rayzero_state{state="running"}': "1x600"}
NOT_STARTED: Samples = {'rayzero_state{state="starting"}': "1x600"}


@dataclass(frozen=True)
class Case:
    """Samples and the expected state of an alert.

    Args:
        eval_time: when the alert is evaluated.
        series: samples by series, without the label `job`.
        value: the value in the alert's description; None if the alert does not fire.
        labels: labels of the alert besides `job` and the severity.
        changed: the chart's values of this alert.
    """

    alert: str
    description: str
    eval_time: str
    series: Samples
    value: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    changed: Mapping[str, object] = field(default_factory=dict)


def _speed(mean_s: float) -> Samples:
    """100 steps of this mean duration."""
    steps = {"rayzero_step_seconds_sum": f"{mean_s * 100}x600"}
    return {**RUNNING, **steps, "rayzero_step_seconds_count": "100x600"}


def _goodput(productive: int, lost: int) -> Samples:
    return {
        **RUNNING,
        "rayzero_start_timestamp_seconds": "0x600",
        'rayzero_time_seconds_total{cause="productive"}': f"0+{productive}x600",
        'rayzero_time_seconds_total{cause="recovery_rendezvous"}': f"0+{lost}x600",
    }


def _unprotected(copy: str, age_s: int, labels: str = "") -> Samples:
    """A step finishes every minute, and the newest checkpoint or replica is `age_s` older."""
    return {
        "rayzero_last_step_timestamp_seconds": "0+60x600",
        f"rayzero_{copy}_unprotected_since_timestamp_seconds{labels}": f"{-age_s}+60x600",
    }


def _replicas(node_s: int, other_s: int) -> Samples:
    """Ages of the newest replicas on the ranks' own nodes and on other nodes."""
    node, other = (f'{{place="{place}"}}' for place in ("node", "other"))
    return _unprotected("replica", node_s, node) | _unprotected("replica", other_s, other)


NO_CHECKPOINT: Samples = {
    "rayzero_last_step_timestamp_seconds": "0+60x600",
    "rayzero_checkpoint_unprotected_since_timestamp_seconds": "60x600",
}
"""No checkpoint since the first step, at minute 1."""


def _ranks(*seconds: float) -> Samples:
    return {
        f'rayzero_rank_compute_seconds{{rank="{rank}"}}': f"{value}x600"
        for rank, value in enumerate(seconds)
    }


FAILED = {
    'rayzero_state{state="running"}': "1x10 0x2",
    'rayzero_state{state="failed"}': "0x10 1x2",
}
SUCCEEDED = {
    'rayzero_state{state="running"}': "1x10 0x2",
    'rayzero_state{state="succeeded"}': "0x10 1x2",
}
RESTARTED = {'rayzero_state{state="running",instance="2"}': "_x14 1x20"}

CASES = (
    Case("RayzeroJobFailed", "it failed", "11m", FAILED, ""),
    Case("RayzeroJobFailed", "it failed, and its endpoint is down", "20m", FAILED, ""),
    Case("RayzeroJobFailed", "it succeeded", "11m", SUCCEEDED),
    Case("RayzeroJobFailed", "it failed and runs again", "20m", {**FAILED, **RESTARTED}),
    Case("RayzeroJobFailed", "it failed an hour ago", "80m", FAILED),
    Case(
        "RayzeroNoFirstStep",
        "it has been starting for 40 minutes",
        "40m",
        {**NOT_STARTED, "rayzero_start_timestamp_seconds": "0x600"},
        "40m 0s",
    ),
    Case(
        "RayzeroNoFirstStep",
        "it has counted no step yet",
        "40m",
        {**RUNNING, "rayzero_start_timestamp_seconds": "0x600", "rayzero_steps_total": "0x600"},
        "40m 0s",
    ),
    Case(
        "RayzeroNoFirstStep",
        "it has been starting for 20 minutes",
        "20m",
        {**NOT_STARTED, "rayzero_start_timestamp_seconds": "0x600"},
    ),
    Case(
        "RayzeroNoFirstStep",
        "it has finished a step",
        "40m",
        {**RUNNING, "rayzero_start_timestamp_seconds": "0x600", "rayzero_steps_total": "1x600"},
    ),
    Case(
        "RayzeroNoFirstStep",
        "it was stopped before its first step",
        "40m",
        {
            'rayzero_state{state="stopped"}': "1x600",
            "rayzero_start_timestamp_seconds": "0x600",
        },
    ),
    Case(
        "RayzeroNoProgress",
        "steps took 1 s, the last was 11 minutes ago",
        "31m",
        {**_speed(1), "rayzero_last_step_timestamp_seconds": "1200x600"},
        "11m 0s",
    ),
    Case(
        "RayzeroNoProgress",
        "steps took 1 s, the last was 9 minutes ago",
        "29m",
        {**_speed(1), "rayzero_last_step_timestamp_seconds": "1200x600"},
    ),
    Case(
        "RayzeroNoProgress",
        "steps take 5 minutes, the last was 40 minutes ago",
        "60m",
        {**_speed(300), "rayzero_last_step_timestamp_seconds": "1200x600"},
    ),
    Case(
        "RayzeroNoProgress",
        "it succeeded an hour ago",
        "80m",
        {
            **_speed(1),
            "rayzero_last_step_timestamp_seconds": "1200x600",
            'rayzero_state{state="running"}': "0x600",
            'rayzero_state{state="succeeded"}': "1x600",
        },
    ),
    Case("RayzeroGoodputLow", "half is lost", "60m", _goodput(30, 30), "50%"),
    Case("RayzeroGoodputLow", "a tenth is lost", "60m", _goodput(54, 6)),
    Case(
        "RayzeroGoodputLow", "half is lost, but the job has just started", "20m", _goodput(30, 30)
    ),
    Case(
        "RayzeroReplicaTooOld",
        "10 minutes behind on the ranks' own nodes",
        "30m",
        {**RUNNING, **_replicas(600, 240)},
        "10m 0s",
        {"place": "node"},
    ),
    Case(
        "RayzeroReplicaTooOld",
        "10 minutes behind on other nodes",
        "30m",
        {**RUNNING, **_replicas(60, 600)},
        "10m 0s",
        {"place": "other"},
    ),
    Case("RayzeroReplicaTooOld", "4 minutes behind", "30m", {**RUNNING, **_replicas(240, 240)}),
    Case(
        "RayzeroReplicaTooOld",
        "10 minutes behind for only a moment",
        "1m",
        {**RUNNING, **_replicas(600, 600)},
    ),
    Case(
        "RayzeroReplicaTooOld",
        "10 minutes behind, while it is being repaired",
        "30m",
        {'rayzero_state{state="recovering"}': "1x600", **_replicas(600, 600)},
    ),
    Case(
        "RayzeroCheckpointTooOld",
        "3 hours behind",
        "30m",
        {**RUNNING, **_unprotected("checkpoint", 10800)},
        "3h 0m 0s",
    ),
    Case(
        "RayzeroCheckpointTooOld",
        "an hour behind",
        "30m",
        {**RUNNING, **_unprotected("checkpoint", 3600)},
    ),
    Case(
        "RayzeroCheckpointTooOld",
        "3 hours behind, but ended",
        "30m",
        {'rayzero_state{state="stopped"}': "1x600", **_unprotected("checkpoint", 10800)},
    ),
    Case(
        "RayzeroCheckpointTooOld",
        "no checkpoint in 3 hours",
        "181m",
        {**RUNNING, **NO_CHECKPOINT},
        "3h 0m 0s",
    ),
    Case(
        "RayzeroCheckpointTooOld", "no checkpoint in an hour", "61m", {**RUNNING, **NO_CHECKPOINT}
    ),
    Case(
        "RayzeroCheckpointsFailing",
        "one failure a minute",
        "20m",
        {"rayzero_checkpoint_failures_total": "0+1x60"},
        "15",
    ),
    Case(
        "RayzeroCheckpointsFailing",
        "one failure, then success",
        "20m",
        {"rayzero_checkpoint_failures_total": "0x10 1x60"},
    ),
    Case(
        "RayzeroFaultBudgetNearlySpent",
        "15 of 20",
        "5m",
        {"rayzero_faults_in_window": "15x60", "rayzero_fault_budget": "20x60"},
        "75%",
    ),
    Case(
        "RayzeroFaultBudgetNearlySpent",
        "14 of 20",
        "5m",
        {"rayzero_faults_in_window": "14x60", "rayzero_fault_budget": "20x60"},
    ),
    Case(
        "RayzeroFaultBudgetNearlySpent",
        "no fault is allowed, and none occurred",
        "5m",
        {"rayzero_faults_in_window": "0x60", "rayzero_fault_budget": "0x60"},
    ),
    Case(
        "RayzeroLossNotFinite",
        "every recent step",
        "20m",
        {"rayzero_nonfinite_losses_total": "0x10 0+1x60"},
        "9",
    ),
    Case(
        "RayzeroLossNotFinite",
        "one step half an hour ago",
        "40m",
        {"rayzero_nonfinite_losses_total": "0x10 1x60"},
    ),
    Case(
        "RayzeroOverflowStorm",
        "half of the steps",
        "20m",
        {"rayzero_skipped_steps_total": "0+3x60", "rayzero_steps_total": "0+6x60"},
        "50%",
    ),
    Case(
        "RayzeroOverflowStorm",
        "a tenth of the steps",
        "20m",
        {"rayzero_skipped_steps_total": "0+6x60", "rayzero_steps_total": "0+60x60"},
    ),
    Case(
        "RayzeroOverflowStorm",
        "all of a few steps",
        "4m",
        {"rayzero_skipped_steps_total": "0+1x60", "rayzero_steps_total": "0+1x60"},
    ),
    Case(
        "RayzeroStraggler",
        "one of four takes twice as long",
        "20m",
        _ranks(1, 1, 2, 1),
        "2s",
        {"rank": "2"},
    ),
    Case("RayzeroStraggler", "one of four takes a fifth longer", "20m", _ranks(1, 1, 1.2, 1)),
    Case("RayzeroStraggler", "for five minutes only", "5m", _ranks(1, 1, 2, 1)),
    Case("RayzeroStraggler", "of milliseconds", "20m", _ranks(0.001, 0.001, 0.02)),
    Case("RayzeroStraggler", "the only rank", "20m", _ranks(1)),
    Case(
        "RayzeroMetricsGone",
        "it was running at the last scrape",
        "18m",
        {'rayzero_state{state="running"}': "1x8"},
        "",
    ),
    Case("RayzeroMetricsGone", "it had succeeded", "18m", SUCCEEDED),
    Case("RayzeroMetricsGone", "it had failed", "18m", FAILED),
    Case(
        "RayzeroMetricsGone",
        "it runs on another instance",
        "20m",
        {'rayzero_state{state="running"}': "1x12", **RESTARTED},
    ),
    Case("RayzeroMetricsGone", "it is being scraped", "18m", RUNNING),
)

# Alerts with other values than the defaults, under which they fire or stay silent.
CASES_WITH_VALUES = (
    Case(
        "RayzeroNoFirstStep",
        "it has been starting for 20 minutes",
        "20m",
        {**NOT_STARTED, "rayzero_start_timestamp_seconds": "0x600"},
        "20m 0s",
        changed={"threshold": 600},
    ),
    Case(
        "RayzeroNoProgress",
        "steps took 1 s, the last was 11 minutes ago",
        "31m",
        {**_speed(1), "rayzero_last_step_timestamp_seconds": "1200x600"},
        changed={"threshold": 900},
    ),
    Case("RayzeroGoodputLow", "half is lost", "60m", _goodput(30, 30), changed={"threshold": 0.4}),
    Case(
        "RayzeroReplicaTooOld",
        "4 minutes behind",
        "30m",
        {**RUNNING, **_unprotected("replica", 240, '{place="other"}')},
        "4m 0s",
        {"place": "other"},
        {"threshold": 120, "for": "1m", "severity": "page", "labels": {"team": "language"}},
    ),
    Case(
        "RayzeroCheckpointTooOld",
        "no checkpoint in 3 hours",
        "181m",
        {**RUNNING, **NO_CHECKPOINT},
        changed={"threshold": 86400},
    ),
    Case(
        "RayzeroCheckpointsFailing",
        "one failure a minute",
        "20m",
        {"rayzero_checkpoint_failures_total": "0+1x60"},
        changed={"threshold": 20},
    ),
    Case(
        "RayzeroFaultBudgetNearlySpent",
        "14 of 20",
        "5m",
        {"rayzero_faults_in_window": "14x60", "rayzero_fault_budget": "20x60"},
        "70%",
        changed={"threshold": 0.5},
    ),
    Case(
        "RayzeroLossNotFinite",
        "nine steps",
        "20m",
        {"rayzero_nonfinite_losses_total": "0x10 0+1x60"},
        changed={"threshold": 10},
    ),
    Case(
        "RayzeroOverflowStorm",
        "half of the steps",
        "20m",
        {"rayzero_skipped_steps_total": "0+3x60", "rayzero_steps_total": "0+6x60"},
        changed={"threshold": 0.6},
    ),
    Case(
        "RayzeroStraggler",
        "one of four takes a fifth longer",
        "20m",
        _ranks(1, 1, 1.2, 1),
        "1.2s",
        {"rank": "2"},
        {"threshold": 1.1},
    ),
    Case("RayzeroJobFailed", "the alert is disabled", "11m", FAILED, changed={"enabled": False}),
)
