"""The job as JSON values: its state at one moment (/snapshot.json), and its curves, log and config
(/history.json)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from math import isfinite
from typing import Any

from rayzero.engine.redact import redact_document, redact_url
from rayzero.orchestrator.job_file import to_document
from rayzero.orchestrator.metrics.goodput import TimeBreakdown
from rayzero.orchestrator.metrics.job_metrics import JobMetrics, ReplicaMetrics
from rayzero.orchestrator.metrics.rank_metrics import RankMetrics, RankMetricsTable
from rayzero.orchestrator.metrics.role_metrics import role_rows, rollout_row
from rayzero.orchestrator.metrics.stream_metrics import stream_rows
from rayzero.orchestrator.spec import JobSpec

SNAPSHOT_FORMAT = 2
"""Incremented when readers of the previous format could misread the value."""
HISTORY_FORMAT = 1
"""The same for /history.json."""
MAX_LINE_CHARACTERS = 500
"""The longest line of the log in /history.json."""


def make_snapshot(metrics: JobMetrics) -> dict[str, Any]:
    """Returns the state of the job without its ranks. Times are Unix seconds. Unknown values, inf
    and nan are None.

    `loss` is [[first step, mean], ...], as of `Curve.means`. Other lists hold the newest entries,
    oldest first. `generations` also has an entry for each lost rank.
    """
    facts, steps = metrics.facts, metrics.steps
    record = steps.last_record
    value = {
        "format": SNAPSHOT_FORMAT,
        "version": version("rayzero"),
        "at_s": metrics.now().unix_s,
        "job": metrics.spec.name,
        "stage": metrics.stage,
        "state": str(facts.state),
        "state_since_s": metrics.state_since.unix_s,
        "waiting_for": None if facts.state.is_final else facts.waiting_for or None,
        "began_s": facts.began_at_s,
        "generation": facts.generation,
        "world_size": facts.world_size,
        "workers": metrics.worker_limits,
        "roles": role_rows(metrics),
        "rollouts": rollout_row(metrics),
        "streams": stream_rows(metrics),
        "progress": {
            "step": facts.step,
            "steps": metrics.spec.steps,
            "remaining_s": metrics.remaining_s,
            "step_s": steps.pace.step_s or None,
            "tokens_per_s": record.tokens_per_s if record else None,
            "samples_per_s": record.samples_per_s if record else None,
            "data_wait_ratio": steps.data_wait_ratio,
            "tokens": facts.counters.tokens,
            "samples": facts.counters.samples,
            "last_step_at_s": steps.last_at_unix_s,
        },
        "training": {
            "loss": record.loss if record else None,
            "learning_rate": steps.gauge("lr"),
            "gradient_norm": steps.gauge("grad_norm"),
            "loss_scale": steps.gauge("loss_scale"),
            "model_flops_utilization": steps.gauge("mfu"),
            "skipped_steps": facts.counters.skipped,
        },
        "usage": {name: steps.gauge(name) for name in ("cpu_cores", "gpu_utilization")},
        "loss": metrics.curves.loss.means(),
        "goodput": _goodput_row(metrics.time_breakdown()),
        "generations": list(map(vars, facts.generations)),
        "faults": list(map(vars, facts.seen_faults)),
        "recoveries": list(map(vars, facts.recoveries)),
        "checkpoints": list(map(vars, facts.checkpoints)),
        "checkpoint_failures": facts.checkpoints_failed,
        "steps_redone": facts.steps_redone,
        "replicas": _replica_row(metrics.replicas),
    }
    return {key: finite_json(item) for key, item in value.items()}


def _replica_row(replicas: ReplicaMetrics) -> dict[str, Any]:
    own = replicas.own_node
    return {
        "step": own.step,
        "at_s": own.at_unix_s,
        "bytes": own.nbytes,
        "step_on_other_nodes": replicas.other_nodes.step,
    }


def _goodput_row(times: TimeBreakdown) -> dict[str, Any]:
    return {
        "ratio": times.goodput,
        "wall_s": times.wall_s,
        "unattributed_s": times.unattributed_s,
        "seconds": {category: spent_s for category, spent_s in times.seconds.items() if spent_s},
    }


def make_history(metrics: JobMetrics) -> dict[str, Any]:
    """Returns data that is too large to read every second. `curves` has rows as of `Curve.rows`, by
    name. The curve `elapsed_s` is the time of each step, in seconds since the run began."""
    curves = metrics.curves
    return {
        "format": HISTORY_FORMAT,
        "job": metrics.spec.name,
        "at_s": metrics.now().unix_s,
        "curves": curves.rows(),
        "names_without_curve": sorted(curves.dropped_names),
    }


def history_texts(spec: JobSpec, log: Sequence[str]) -> dict[str, Any]:
    """Returns the `log` and `config` of /history.json, without secrets."""
    lines = [redact_url(line)[:MAX_LINE_CHARACTERS] for line in log]
    return {"log": lines, "config": redact_document(to_document(spec))}


def to_json(value: Any) -> bytes:
    """Returns a value, which must not contain inf or nan, as JSON."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def snapshot_ranks(ranks: RankMetricsTable) -> list[dict[str, Any]]:
    """Returns the `ranks` of /snapshot.json, in order."""
    return [finite_json(_rank_row(rank, metrics)) for rank, metrics in ranks.rows]


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


def finite_json(value: Any, convert: Callable[[float], str | None] = lambda _: None) -> Any:
    """Replaces inf and nan, which JSON cannot represent, with None or the result of `convert`."""
    if isinstance(value, dict):
        return {key: finite_json(item, convert) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item, convert) for item in value]
    return convert(value) if isinstance(value, float) and not isfinite(value) else value
