"""The job as JSON values: at one moment (/snapshot.json), what led there (/history.json), and its
counters across an adoption."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from math import isfinite
from typing import Any

from rayzero.engine.redact import redact_document, redact_url
from rayzero.orchestrator.job_file import to_document
from rayzero.orchestrator.journal.run_history import RunHistory, faults_on_clock
from rayzero.orchestrator.metrics.goodput import TimeBreakdown
from rayzero.orchestrator.metrics.job_metrics import JOURNALED_TOTALS, JobMetrics, Timestamps
from rayzero.orchestrator.metrics.rank_metrics import RankMetrics, RankMetricsTable
from rayzero.orchestrator.spec import JobSpec

SNAPSHOT_FORMAT = 2
"""Incremented when readers of the previous format could misread the value."""
HISTORY_FORMAT = 1
"""The same, of /history.json."""
MAX_LINE_CHARACTERS = 500
"""Of a line of the log in /history.json."""


def make_snapshot(metrics: JobMetrics) -> dict[str, Any]:
    """The job without its ranks. Times are Unix seconds; unknown values, inf and nan are None.

    `loss` is [[first step, mean], ...], of as many steps each as it takes; lists hold the newest
    entries, oldest first. `generations` has an entry where a rank is lost, too.
    """
    steps, history = metrics.steps, metrics.history
    record = steps.last_record
    target = metrics.spec.steps
    replica = metrics.replicas.own_node
    value = {
        "format": SNAPSHOT_FORMAT,
        "version": version("rayzero"),
        "at_s": metrics.now().unix_s,
        "job": metrics.spec.name,
        "stage": metrics.stage,
        "state": str(metrics.state),
        "state_since_s": metrics.state_since.unix_s,
        "waiting_for": None if metrics.state.is_final else history.waiting_for or None,
        "began_s": metrics.started.unix_s,
        "generation": metrics.generation,
        "world_size": metrics.ranks.world_size,
        "workers": dict(zip(("min", "max"), metrics.worker_limits, strict=True)),
        "progress": {
            "step": steps.step,
            "steps": target,
            "remaining_s": steps.remaining_s(target),
            "step_s": steps.pace.step_s or None,
            "tokens_per_s": record.tokens_per_s if record else None,
            "samples_per_s": record.samples_per_s if record else None,
            "tokens": steps.tokens,
            "samples": steps.samples,
            "last_step_at_s": steps.last_at_unix_s,
        },
        "training": {
            "loss": record.loss if record else None,
            "learning_rate": steps.gauge("lr"),
            "gradient_norm": steps.gauge("grad_norm"),
            "loss_scale": steps.gauge("loss_scale"),
            "model_flops_utilization": steps.gauge("mfu"),
            "skipped_steps": steps.skipped,
        },
        "usage": {name: steps.gauge(name) for name in ("cpu_cores", "gpu_utilization")},
        "loss": history.curves.loss.means(),
        "goodput": _goodput_row(metrics.time_breakdown()),
        "generations": list(history.generations),
        "faults": list(history.faults),
        "recoveries": list(history.recoveries),
        "checkpoints": list(history.checkpoints),
        "checkpoint_failures": metrics.checkpoints.failed,
        "steps_redone": metrics.faults.steps_redone,
        "replicas": {
            "step": replica.step,
            "at_s": replica.at_unix_s,
            "bytes": replica.nbytes,
            "step_on_other_nodes": metrics.replicas.other_nodes.step,
        },
    }
    return {key: finite_json(item) for key, item in value.items()}


def _goodput_row(times: TimeBreakdown) -> dict[str, Any]:
    return {
        "ratio": times.goodput,
        "wall_s": times.wall_s,
        "unattributed_s": times.unattributed_s,
        "seconds": {category: s for category, s in times.seconds.items() if s},
    }


def make_history(metrics: JobMetrics) -> dict[str, Any]:
    """The data that is too large to read every second. `curves` by name: rows as of `Curve.rows`;
    `elapsed_s` has the time of each step, in seconds since the run began."""
    curves = metrics.history.curves
    return {
        "format": HISTORY_FORMAT,
        "job": metrics.spec.name,
        "at_s": metrics.now().unix_s,
        "curves": curves.rows(),
        "names_without_curve": sorted(curves.dropped_names),
    }


def history_texts(spec: JobSpec, log: Sequence[str]) -> dict[str, Any]:
    """The value's `log` and `config`, without secrets."""
    lines = [redact_url(line)[:MAX_LINE_CHARACTERS] for line in log]
    return {"log": lines, "config": redact_document(to_document(spec))}


def snapshot_ranks(ranks: RankMetricsTable) -> list[dict[str, Any]]:
    """The value's `ranks`, in order."""
    return [finite_json(_rank_row(rank, ranks.by_rank[rank])) for rank in sorted(ranks.by_rank)]


def _rank_row(rank: int, metrics: RankMetrics) -> dict[str, Any]:
    beat = metrics.beat
    return {
        "rank": rank,
        "node": metrics.node,
        "phase": beat.phase if beat else None,
        "step": beat.step if beat else None,
        "silent_s": beat.silent_s if beat else None,
        "waiting": beat.waiting if beat else None,
        "step_s": metrics.gauge("step_s"),
        "resident_bytes": metrics.gauge("resident_bytes"),
        "cpu_cores": metrics.gauge("cpu_cores"),
        "gpu_utilization": metrics.gauge("gpu_utilization"),
    }


def finite_json(value: Any) -> Any:
    """Replaces inf and nan, which JSON does not have, with None."""
    if isinstance(value, dict):
        return {key: finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def dump_counters(metrics: JobMetrics) -> dict[str, Any]:
    """Counters for the journal that cannot be derived from its events, and the last step's loss."""
    seconds, record = metrics.time_breakdown().seconds, metrics.steps.last_record
    return {
        "loss": finite_json(record.loss if record else None),
        "seconds": {category: round(s, 3) for category, s in seconds.items() if s},
        **{field: getattr(metrics.steps, field) for field in JOURNALED_TOTALS},
    }


def restore_metrics(metrics: JobMetrics, past: RunHistory) -> None:
    """Continues the counts of a run that is adopted. `metrics` are new."""
    now = metrics.now()
    ago_s = max(0.0, now.unix_s - past.began_at_s)
    metrics.started = Timestamps(now.clock_s - ago_s, past.began_at_s)
    metrics.time_accounting.restore(past.counters.get("seconds", {}), past.best_step, ago_s)
    for field in JOURNALED_TOTALS:
        to_number = type(getattr(metrics.steps, field))
        setattr(metrics.steps, field, to_number(past.counters.get(field, 0)))
    metrics.steps.step = past.step
    metrics.faults.adopted_at_step = past.step
    metrics.generation = past.generation
    if past.scaled_limits is not None:
        metrics.worker_limits = past.scaled_limits
    for fault in faults_on_clock(past, now.clock_s, now.unix_s):
        metrics.faults.on_fault(fault)
    metrics.faults.repairs_by_cause.update(past.repairs_by_cause)
    metrics.faults.resizes = past.resizes
    metrics.faults.steps_redone = past.steps_redone
    metrics.checkpoints.written = past.checkpoints_written
    metrics.checkpoints.failed = past.checkpoints_failed
    if past.checkpoint_step is not None:
        metrics.checkpoints.set_newest(past.checkpoint_step, past.checkpoint_at_s)
    metrics.history.restore(past)
