"""Earlier runs in a job's folder.

A lost run is adopted. The result of a run that has succeeded is repeated if nothing is left to
train. With `checkpoint.resume: scratch` the files of earlier runs are set aside.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from rayzero.engine.checkpoint.catalogue import newest_complete
from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.store import is_remote, local_path, open_store
from rayzero.engine.config import parse_config
from rayzero.engine.data.batch_sizes import resolve_batch_sizes
from rayzero.engine.errors import ConfigError
from rayzero.engine.redact import redact_document
from rayzero.engine.validation import validate_document
from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.facts import JobFacts
from rayzero.orchestrator.job.claims import LEASE_FOLDER
from rayzero.orchestrator.job_file import (
    ADOPTABLE_KEYS,
    diff_documents,
    not_covered_by,
    to_document,
)
from rayzero.orchestrator.journal.files import (
    STATE_FILE,
    read_journal,
    read_sound_journal,
    write_end,
)
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.policies.usefulness import LastRun
from rayzero.orchestrator.results import OWN_KEYS, JobResult
from rayzero.orchestrator.spec import JobSpec

TRAIN_HINT = (
    "set more steps, another name, or --restart (restart=True), which sets the files of the last "
    "run aside"
)

CHANGED_SOURCE = "its file, or a module that it imports from here, has changed"

_ANY_WEIGHTS = (*ADOPTABLE_KEYS, "checkpoint")
"""Keys that do not determine what is trained."""


@dataclass(frozen=True)
class PastRuns:
    """The earlier run from which a job continues, if any. At most one of the two is set.

    Args:
        lost: a run to adopt, because its controller was lost before the run's end.
        last: the last run, if it has ended and this job may continue from its checkpoints.
    """

    lost: JobFacts | None = None
    last: LastRun | None = None


def load_past_runs(plan: JobPlan, warn: Callable[[str], None]) -> PastRuns:
    """Returns the earlier run from which this job continues. With `checkpoint.resume: scratch` sets
    the files of the last run aside. May block; the caller holds the folder's lease.

    Raises:
        ConfigError: the last run was lost and this job differs from it; or the journal is damaged,
            and `checkpoint.resume` does not name what to begin with.
        JobStoppedError: this process was restarted just after the job's end.
    """
    says_what_to_begin_with = plan.spec.checkpoint.resume not in ("auto", "never")
    read = read_journal if says_what_to_begin_with else read_sound_journal
    history = read(plan.job_folder)
    if history is not None and history.end_state and history.run == plan.worker_spec.run:
        raise JobStoppedError(f"job {plan.spec.name!r} has ended before: {history.end_state}")
    if plan.spec.checkpoint.resume == "scratch" and not _is_restarting(history, plan):
        if history is not None and not history.end_state:
            write_end(plan.job_folder, history, "given up by checkpoint.resume: scratch")
        if folder := set_aside(plan.job_folder):
            warn(f"the job starts from scratch; the files of its last run are now in {folder}")
        return PastRuns()
    if history is None:
        return PastRuns()
    if history.end_state:
        return PastRuns(last=compare_with(history, plan.spec, plan.source))
    if (refusal := why_not_adoptable(history, plan.spec)) is not None:
        raise refusal
    workers, before = plan.spec.workers, history.spec.get("workers", {})
    same_limits = (before.get("min"), before.get("max")) == (workers.min, workers.most)
    return PastRuns(history if same_limits else replace(history, scaled_limits=None))


def _is_restarting(history: JobFacts | None, plan: JobPlan) -> bool:
    """Returns whether a run that started from scratch was lost. The same command continues such a
    run, because the program that submitted the job may repeat the command by itself."""
    if history is None or history.end_state:
        return False
    before = history.spec.get("checkpoint", {}).get("resume")
    return history.run == plan.worker_spec.run or before == "scratch"


def set_aside(job_folder: str) -> str:
    """Moves everything in a job's folder except its lease into a new folder next to it: NAME.1, or
    the next free number. Returns the new folder; an empty string if there is nothing to move, or
    in an object store, which cannot move files (there only damaged checkpoints may be left)."""
    if is_remote(job_folder):
        return ""
    folder = Path(local_path(job_folder))
    names = {entry.name for entry in os.scandir(folder)} - {LEASE_FOLDER}
    if not names:
        return ""
    for number in count(1):
        target = folder.with_name(f"{folder.name}.{number}")
        with suppress(FileExistsError):
            target.mkdir()
            break
    for name in sorted(names, key=lambda name: (name == STATE_FILE, name)):  # the journal last
        os.rename(folder / name, target / name)
    return str(target)


def repeated_result(plan: JobPlan, last: LastRun | None) -> JobResult | None:
    """Returns the result of the last run, if that run has made all steps of this job. Returns None
    if steps are left to train, or may be. May block.

    Raises:
        ConfigError: no steps are left, but this job would have trained other weights.
    """
    spec = plan.spec
    if last is None or not last.has_succeeded or not spec.steps or spec.checkpoint.resume != "auto":
        return None
    newest = newest_complete(plan.job_folder)
    if newest is None or newest.step < spec.steps:
        return None
    differences = list(last.differences)
    if newest.step > spec.steps:
        differences.append(f"steps: {newest.step} -> {spec.steps}")
    if differences:
        listed = "\n".join(f"    {line}" for line in differences)
        raise ConfigError(
            f"nothing is left to train: the last run of job {spec.name!r} has finished "
            f"{newest.step} of {spec.steps} steps, and this job differs from it:\n{listed}",
            allowed="the same job, which repeats its result",
            fix=f"{TRAIN_HINT}; checkpoint.resume: {newest.folder} runs the function with its "
            "weights, without a step",
        )
    summary = _read_summary(plan)
    if summary is None:
        return None
    note = (
        f"nothing is left to train: the last run of job {spec.name!r} has finished all "
        f"{spec.steps} steps, and this job is the same; its result is repeated. To train: "
        f"{TRAIN_HINT}"
    )
    returned = {key: value for key, value in summary.items() if key not in OWN_KEYS}
    return JobResult(spec.name, summary | {"note": note}, plan.summary_path, returned)


def remove_summary(plan: JobPlan) -> None:
    """Removes `summary.json`, which a job's folder has if and only if its last run has succeeded.
    May block, and raise StoreError."""
    plan.summary_path.unlink(missing_ok=True)
    if plan.spec.checkpoint.is_url:
        open_store(plan.job_folder).remove(plan.summary_path.name)


def _read_summary(plan: JobPlan) -> dict[str, Any] | None:
    """Reads `summary.json` from the store; that of an earlier version from this machine's disk."""
    with suppress(OSError, ValueError):
        try:
            content = open_store(plan.job_folder).read(plan.summary_path.name)
            if plan.spec.checkpoint.is_url:  # another machine may have made the run
                plan.summary_path.write_bytes(content)
        except StoreError:
            content = plan.summary_path.read_bytes()
        summary = json.loads(content)
        return summary if isinstance(summary, dict) and "steps" in summary else None
    return None


def compare_with(history: JobFacts, spec: JobSpec, source: str) -> LastRun:
    """Returns the last run, with its differences from this job.

    Args:
        source: the hash of this job's code, by `hash_source`.
    """
    diffs = diff_documents(_with_defaults(history.spec), redact_document(to_document(spec)))
    lines = not_covered_by(diffs, _ANY_WEIGHTS) + _global_batch_diff(history, spec)
    if history.source and source and history.source != source:
        script = spec.launch and (spec.launch.script or spec.launch.module)
        lines.append(f"{script or spec.entrypoint}: {CHANGED_SOURCE}")
    return LastRun(history.end_state, history.step, tuple(lines))


def _with_defaults(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the document as this version would have written it. Another version may have other
    keys."""
    with suppress(ConfigError):
        return to_document(validate_document(JobSpec, dict(document), "the journal"))
    return document


def why_not_adoptable(history: JobFacts, spec: JobSpec) -> ConfigError | None:
    """Returns an error that says why this job must not continue a lost run; None if it may."""
    document = redact_document(to_document(spec))
    diffs = not_covered_by(diff_documents(history.spec, document), ADOPTABLE_KEYS)
    diffs += _global_batch_diff(history, spec)
    if not diffs:
        return None
    listed = "\n".join(f"    {diff}" for diff in diffs)
    return ConfigError(
        f"the last run of job {spec.name!r} was lost at step {history.step} before its end, and "
        f"this job differs from it:\n{listed}",
        allowed="the same training: entrypoint, args, seed, optimizer, schedule, global batch",
        fix=f"change the job file or the name, or run `rayzero stop {spec.name}`, which gives that "
        "run up",
    )


def _global_batch_diff(history: JobFacts, spec: JobSpec) -> list[str]:
    """Compares the global batches, where they follow from the micro-batch size."""
    if not isinstance(spec.engine, dict) or "train_batch_size" in spec.engine:
        return []
    before, after = history.spec.get("engine"), spec.engine
    try:
        workers = int(history.spec["workers"]["min"])
        old = resolve_batch_sizes(parse_config(dict(before or {})), workers).global_batch
        new = resolve_batch_sizes(parse_config(after), spec.workers.min).global_batch
    except (ConfigError, KeyError, TypeError, ValueError):
        return []
    return [] if old == new else [f"engine: the global batch: {old} -> {new}"]
