"""The job at one moment, as one JSON value: all that a page or a terminal shows. Pure."""

from __future__ import annotations

from importlib.metadata import version
from math import isfinite
from typing import Any

from rayzero.orchestrator.metrics.ranks import Rank, Ranks
from rayzero.orchestrator.metrics.tally import Now, Tally

FORMAT = 1
"""Grows when a reader of the value before could misread it."""


def snapshot(tally: Tally, now: Now) -> dict[str, Any]:
    """Times are Unix seconds; what nobody knows, and what is inf or nan, is None.

    `loss` is [[step, loss], ...], thinned; the lists of what happened are the newest entries, the
    oldest first. The ranks are `rank_rows`'s.
    """
    facts, history, times = tally.facts, tally.history, tally.times(now)
    value: dict[str, Any] = {
        "format": FORMAT,
        "version": version("rayzero"),
        "at_s": now.unix_s,
        "job": facts.name,
        "stage": facts.stage,
        "state": str(tally.state),
        "state_since_s": tally.state_at.unix_s,
        "began_s": tally.began.unix_s,
        "generation": tally.generation,
        "world_size": tally.world_size,
        "workers": dict(zip(("min", "max"), tally.limits, strict=True)),
        "progress": _progress(tally),
        "training": _training(tally),
        "loss": history.loss.points(),
        "goodput": {
            "ratio": times.goodput,
            "wall_s": times.wall_s,
            "pending_s": times.pending_s,
            "seconds": {str(why): s for why, s in times.seconds.items() if s},
        },
        "generations": list(history.generations),
        "faults": list(history.faults),
        "ways": list(history.ways),
        "checkpoints": list(history.checkpoints),
        "checkpoint_failures": tally.checkpoints.failed,
        "steps_redone": tally.troubles.steps_redone,
        "replicas": {
            "step": tally.replicas.node.step,
            "at_s": tally.replicas.node.at_unix_s if tally.replicas.node.step is not None else None,
            "bytes": tally.replicas.node.nbytes,
            "step_elsewhere": tally.replicas.other.step,
        },
    }
    plain: dict[str, Any] = _plain(value)
    return plain


def rank_rows(ranks: Ranks) -> list[dict[str, Any]]:
    """`ranks` of the value: those that said something, by number."""
    rows: list[dict[str, Any]] = _plain(
        [_rank(rank, one) for rank, one in sorted(ranks.by_rank.items())]
    )
    return rows


def _progress(tally: Tally) -> dict[str, Any]:
    steps, target = tally.steps, tally.facts.steps
    return {
        "step": steps.step,
        "steps": target,
        "remaining_s": steps.remaining_s(target),
        "step_s": steps.pace_s or None,
        "tokens_per_s": steps.last.tokens_per_s if steps.last else None,
        "tokens": steps.tokens,
        "samples": steps.samples,
        "last_step_at_s": steps.last_at_unix_s,
    }


def _training(tally: Tally) -> dict[str, Any]:
    last = tally.steps.last
    gauges = last.gauges if last else {}
    return {
        "loss": last.loss if last else None,
        "learning_rate": gauges.get("lr"),
        "gradient_norm": gauges.get("grad_norm"),
        "loss_scale": gauges.get("loss_scale"),
        "model_flops_utilization": gauges.get("mfu"),
        "skipped_steps": tally.steps.skipped,
    }


def _rank(rank: int, one: Rank) -> dict[str, Any]:
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


def _plain(value: Any) -> Any:
    """The same with None for what JSON has no word for."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value
