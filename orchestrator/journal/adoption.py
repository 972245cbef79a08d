"""Whether a lost run can be gone on with by what was submitted now. Pure."""

from __future__ import annotations

from dataclasses import replace

from rayzero.engine.config import parse_config, solve_batches
from rayzero.engine.errors import ConfigError
from rayzero.engine.masking import redacted
from rayzero.orchestrator.differences import ADOPTABLE, Difference, beyond, differences, document
from rayzero.orchestrator.journal.past import Past
from rayzero.orchestrator.policies.failure import Fault
from rayzero.orchestrator.spec import JobSpec


def refusal(past: Past, spec: JobSpec) -> ConfigError | None:
    """Why not; None when it can."""
    found = beyond(differences(past.spec, redacted(document(spec))), ADOPTABLE)
    found += _batches(past, spec)
    if not found:
        return None
    listed = "\n".join(f"    {one}" for one in found)
    return ConfigError(
        f"the last run of job {spec.name!r} was lost at step {past.step} and has not ended, and "
        f"this is another job:\n{listed}",
        allowed="the same training: entrypoint, args, seed, optimizer, schedule, global batch",
        fix=f"the job file, another name, or `rayzero stop {spec.name}`, which gives that run up",
    )


def budgeted(past: Past, now_s: float, unix_s: float) -> list[Fault]:
    """The faults of the past by the clock of today's controller."""
    return [replace(one, at_s=now_s - (unix_s - one.at_s)) for one in past.faults]


def _batches(past: Past, spec: JobSpec) -> list[Difference]:
    """The global batch that the micro-batch and its number amount to."""
    if not isinstance(spec.engine, dict) or "train_batch_size" in spec.engine:
        return []
    before, after = past.spec.get("engine"), spec.engine
    try:
        least = int(past.spec["workers"]["min"])
        old = solve_batches(parse_config(dict(before or {})), least).global_batch
        new = solve_batches(parse_config(after), spec.workers.min).global_batch
    except (ConfigError, KeyError, TypeError, ValueError):
        return []
    return [] if old == new else [Difference("engine: the global batch", str(old), str(new))]
