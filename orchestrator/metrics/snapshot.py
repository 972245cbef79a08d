"""/snapshot.json; dump and restore for adoption.

The job at one moment, as one JSON value: all that a page or a terminal shows. Pure.

What was counted of a run, for its journal, and a tally that goes on from there. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from math import isfinite
from typing import Any

from rayzero.orchestrator.journal.run_history import MAX_ENTRIES, RunHistory, faults_on_clock
from rayzero.orchestrator.metrics.catalog import JOURNAL_FIELDS
from rayzero.orchestrator.metrics.components import RankMetrics, RankMetricsTable
from rayzero.orchestrator.metrics.job_metrics import JobMetrics, Timestamps
from rayzero.orchestrator.metrics.primitives import DisplayHistory
from rayzero.orchestrator.policies.failure import describe_fault

SNAPSHOT_FORMAT = 1
"""Grows when a reader of the value before could misread it."""


def make_snapshot(tally: JobMetrics, now: Timestamps) -> dict[str, Any]:
    """Times are Unix seconds; what nobody knows, and what is inf or nan, is None.

    `loss` is [[step, loss], ...], thinned; the lists of what happened are the newest entries, the
    oldest first. The ranks are `rank_rows`'s.
    """
    facts, history, times = tally.info, tally.history, tally.time_breakdown(now)
    value: dict[str, Any] = {
        "format": SNAPSHOT_FORMAT,
        "version": version("rayzero"),
        "at_s": now.unix_s,
        "job": facts.name,
        "stage": facts.stage,
        "state": str(tally.state),
        "state_since_s": tally.state_since.unix_s,
        "began_s": tally.started.unix_s,
        "generation": tally.generation,
        "world_size": tally.world_size,
        "workers": dict(zip(("min", "max"), tally.worker_limits, strict=True)),
        "progress": _progress_section(tally),
        "training": _training_section(tally),
        "loss": history.loss.points(),
        "goodput": {
            "ratio": times.goodput,
            "wall_s": times.wall_s,
            "pending_s": times.unattributed_s,
            "seconds": {str(why): s for why, s in times.seconds.items() if s},
        },
        "generations": list(history.generations),
        "faults": list(history.faults),
        "ways": list(history.recoveries),
        "checkpoints": list(history.checkpoints),
        "checkpoint_failures": tally.checkpoints.failed,
        "steps_redone": tally.faults.steps_redone,
        "replicas": {
            "step": tally.replicas.own_node.step,
            "at_s": tally.replicas.own_node.at_unix_s
            if tally.replicas.own_node.step is not None
            else None,
            "bytes": tally.replicas.own_node.nbytes,
            "step_elsewhere": tally.replicas.other_nodes.step,
        },
    }
    plain: dict[str, Any] = _to_finite_json(value)
    return plain


def snapshot_ranks(ranks: RankMetricsTable) -> list[dict[str, Any]]:
    """`ranks` of the value: those that said something, by number."""
    rows: list[dict[str, Any]] = _to_finite_json(
        [_rank_row(rank, one) for rank, one in sorted(ranks.by_rank.items())]
    )
    return rows


def _progress_section(tally: JobMetrics) -> dict[str, Any]:
    steps, target = tally.steps, tally.info.target_steps
    return {
        "step": steps.step,
        "steps": target,
        "remaining_s": steps.remaining_s(target),
        "step_s": steps.smoothed_step_s or None,
        "tokens_per_s": steps.last_record.tokens_per_s if steps.last_record else None,
        "tokens": steps.tokens,
        "samples": steps.samples,
        "last_step_at_s": steps.last_at_unix_s,
    }


def _training_section(tally: JobMetrics) -> dict[str, Any]:
    last = tally.steps.last_record
    gauges = last.gauges if last else {}
    return {
        "loss": last.loss if last else None,
        "learning_rate": gauges.get("lr"),
        "gradient_norm": gauges.get("grad_norm"),
        "loss_scale": gauges.get("loss_scale"),
        "model_flops_utilization": gauges.get("mfu"),
        "skipped_steps": tally.steps.skipped,
    }


def _rank_row(rank: int, one: RankMetrics) -> dict[str, Any]:
    beat = one.beat
    return {
        "rank": rank,
        "node": one.node,
        "phase": beat.phase if beat else None,
        "step": beat.step if beat else None,
        "silent_s": beat.silent_s if beat else None,
        "waiting": beat.waiting if beat else None,
        "step_s": one.gauge("step_s"),
        "resident_bytes": one.gauge("resident_bytes"),
    }


def _to_finite_json(value: Any) -> Any:
    """The same with None for what JSON has no word for."""
    if isinstance(value, dict):
        return {key: _to_finite_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_to_finite_json(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def dump_counters(tally: JobMetrics, now: Timestamps) -> dict[str, Any]:
    """What a journal does not tell line by line."""
    seconds = tally.time_breakdown(now).seconds
    return {
        "seconds": {str(why): round(spent, 3) for why, spent in seconds.items() if spent},
        **{field: getattr(tally.steps, field) for field in JOURNAL_FIELDS},
    }


def restore_metrics(tally: JobMetrics, past: RunHistory, now: Timestamps) -> None:
    """Makes a new tally that of a lost run, at its adoption."""
    ago_s = max(0.0, now.unix_s - past.began_at_s)
    tally.started = Timestamps(now.clock_s - ago_s, past.began_at_s)
    tally.time_accounting.restore(past.counters.get("seconds", {}), past.best_step, ago_s)
    for field in JOURNAL_FIELDS:
        to_number = type(getattr(tally.steps, field))
        setattr(tally.steps, field, to_number(past.counters.get(field, 0)))
    tally.steps.step = past.step
    tally.resumed_at_step = past.step
    tally.generation = past.generation
    if past.scaled_limits is not None:
        tally.worker_limits = past.scaled_limits
    for fault in faults_on_clock(past, now.clock_s, now.unix_s):
        tally.faults.judged(fault)
    tally.faults.repairs_by_cause.update(past.repairs_by_cause)
    tally.faults.resizes = past.resizes
    tally.faults.steps_redone = past.steps_redone
    tally.checkpoints.written = past.checkpoints_written
    tally.checkpoints.failed = past.checkpoints_failed
    if past.checkpoint_step is not None:
        tally.checkpoints.set_newest(past.checkpoint_step, past.checkpoint_at_s)
    _restore_history(tally.history, past)


def _restore_history(history: DisplayHistory, past: RunHistory) -> None:
    """The lists of a page, as far as the journal has them: it knows no losses."""
    for fault in past.faults[-MAX_ENTRIES:]:
        where = {"rank": fault.rank, "step": fault.step, "text": describe_fault(fault)}
        history.faults.append({"at_s": fault.at_s, "cause": str(fault.cause), **where})
    history.generations.extend(_parse_entries(past, "moved", _generation_entry))
    ways = [
        *_parse_entries(past, "repaired", _recovery_entry),
        *_parse_entries(past, "resized", _recovery_entry),
    ]
    history.recoveries.extend(sorted(ways, key=lambda one: float(one["at_s"])))
    history.checkpoints.extend(_parse_entries(past, "checkpoint", _checkpoint_entry))


def _parse_entries(
    past: RunHistory, kind: str, entry: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Of those lines that have what is shown; a later version may have written others."""
    found = []
    for line in past.entries.get(kind, ()):
        with suppress(KeyError, TypeError, ValueError):
            found.append({"at_s": float(line["at_s"]), **entry(line)})
    return found


def _generation_entry(line: Mapping[str, Any]) -> dict[str, Any]:
    return {"generation": int(line["generation"]), "world_size": int(line["world_size"])}


def _recovery_entry(line: Mapping[str, Any]) -> dict[str, Any]:
    repair = line["kind"] == "repaired"
    return {
        "kind": "repair" if repair else "resize",
        "cause": str(line["cause" if repair else "reason"]),
        "step": int(line["step"]),
        "steps_redone": int(line["steps_redone"]) if repair else 0,
        "world_size_before": int(line["world_size_before"]),
        "world_size": int(line["world_size"]),
        "total_s": float(line["total_s"]),
        "seconds": {str(part): float(spent) for part, spent in dict(line["seconds"]).items()},
    }


def _checkpoint_entry(line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": int(line["step"]),
        "bytes": int(line["nbytes"]),
        "seconds": float(line["seconds"]),
    }
