"""Metrics of a job's roles and rollouts, and their part of the job's snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rayzero.orchestrator.metrics.job_metrics import JobMetrics
from rayzero.orchestrator.metrics.role_table import RoleValues
from rayzero.orchestrator.metrics.series import Sample, Samples, counter, gauge
from rayzero.orchestrator.policies.failure import HARDWARE_CAUSES, USER_CODE_CAUSES
from rayzero.orchestrator.role_facts import MAX_ROLE_ENTRIES
from rayzero.workers.rollouts.counts import RolloutCounts


def role_rows(job: JobMetrics) -> dict[str, dict[str, Any]]:
    """Returns the limits, workers, faults and reported values of each role, by role. `generations`
    has the number of workers over time, in the form that the generations of the ranks have."""
    rows: dict[str, dict[str, Any]] = {}
    for name, role in job.spec.roles.items():
        facts = job.facts.role(name)
        reported = job.roles.by_role.get(name, RoleValues())
        least, most = facts.scaled or (role.workers.min, role.workers.most)
        rows[name] = {
            "min": least,
            "max": most,
            "workers": facts.workers,
            "finished": facts.finished,
            "faults": dict(facts.faults),
            "generations": [
                {"at_s": size.at_s, "world_size": size.workers} for size in facts.sizes
            ],
            "seen_faults": list(map(vars, facts.seen_faults[-MAX_ROLE_ENTRIES:])),
            "tokens_per_s": reported.tokens_per_s,
            "version": reported.oldest_version,
            "values": {
                value: {"mean": spread.mean, "low": spread.low, "high": spread.high}
                for value, spread in sorted(reported.values.items())
            },
        }
    return rows


def rollout_row(job: JobMetrics) -> dict[str, Any] | None:
    """Returns the counts of the rollout buffer, with tasks by role; None without a buffer."""
    if (event := job.roles.rollouts) is None:
        return None
    counts = event.counts
    by_role = ("waiting", "leased", "expired", "wait_s")
    return {
        **vars(counts),
        **{name: dict(zip(event.stages, getattr(counts, name), strict=True)) for name in by_role},
    }


def _of_roles(read: Callable[[RoleValues], Sample]) -> Callable[[JobMetrics], Samples]:
    return lambda job: {
        role: read(job.roles.by_role.get(role, RoleValues())) for role in job.spec.roles
    }


def _values(job: JobMetrics) -> Mapping[tuple[str, ...], float]:
    return {
        (role, name): spread.mean
        for role, reported in sorted(job.roles.by_role.items())
        for name, spread in sorted(reported.values.items())
    }


def _workers(job: JobMetrics) -> Mapping[str, float]:
    return {role: row["workers"] for role, row in role_rows(job).items()}


def _limits(job: JobMetrics) -> Mapping[tuple[str, ...], float]:
    rows = role_rows(job).items()
    return {(role, limit): row[limit] for role, row in rows for limit in ("min", "max")}


def _faults(job: JobMetrics) -> Mapping[tuple[str, ...], float]:
    rows = role_rows(job).items()
    return {(role, cause): count for role, row in rows for cause, count in row["faults"].items()}


def _faults_in_window(job: JobMetrics) -> Mapping[str, float]:
    return {
        name: max(
            sum(
                fault.cause in causes
                and fault.at_s > job.now().unix_s - role.recovery.fault_window_s
                for fault in job.facts.role(name).seen_faults
            )
            for causes in (HARDWARE_CAUSES, USER_CODE_CAUSES)
        )
        for name, role in job.spec.roles.items()
    }


def _of_rollouts(read: Callable[[RolloutCounts], Samples]) -> Callable[[JobMetrics], Samples]:
    return lambda job: None if job.roles.rollouts is None else read(job.roles.rollouts.counts)


def _tasks(job: JobMetrics) -> Mapping[tuple[str, ...], float]:
    if (row := rollout_row(job)) is None:
        return {}
    return {
        (role, state): number
        for state in ("waiting", "leased")
        for role, number in row[state].items()
    }


def _by_role(name: str) -> Callable[[JobMetrics], Samples]:
    return lambda job: (rollout_row(job) or {}).get(name)


ROLE_SERIES = (
    gauge("rayzero_role_workers", "Workers of a role whose function runs.", _workers, "role"),
    gauge(
        "rayzero_role_worker_limits",
        "Minimum and maximum number of a role's workers.",
        _limits,
        "role",
        "limit",
    ),
    counter(
        "rayzero_role_faults_total",
        "Faults of a role's workers, by cause.",
        _faults,
        "role",
        "cause",
    ),
    gauge(
        "rayzero_role_faults_in_window",
        "Faults that currently count against a role's budget: of hardware or of its function, "
        "whichever are more.",
        _faults_in_window,
        "role",
    ),
    gauge(
        "rayzero_role_fault_budget",
        "Faults that a role is allowed within its window.",
        lambda job: {name: role.recovery.max_faults for name, role in job.spec.roles.items()},
        "role",
    ),
    gauge(
        "rayzero_role_value",
        "Values that a role's worker passed to `ctx.report`, the mean of its newest message.",
        _values,
        "role",
        "name",
    ),
    counter(
        "rayzero_role_tokens_total",
        "Tokens that a role's workers have reported.",
        _of_roles(lambda values: values.tokens),
        "role",
    ),
    gauge(
        "rayzero_role_oldest_version",
        "Finished steps of the oldest weights that one of a role's workers has.",
        _of_roles(lambda values: values.oldest_version),
        "role",
    ),
    counter(
        "rayzero_role_weights_wait_seconds_total",
        "Time that a role's workers waited for weights, the sum over workers.",
        _of_roles(lambda values: values.weights_wait_s),
        "role",
    ),
)

ROLLOUT_SERIES = (
    gauge(
        "rayzero_rollout_tasks",
        "Tasks of a role that no worker has (`waiting`), or one has (`leased`).",
        _tasks,
        "role",
        "state",
    ),
    gauge(
        "rayzero_rollout_ready_prompts",
        "Prompts with all their samples that the trainer has not asked for yet.",
        _of_rollouts(lambda counts: counts.ready),
    ),
    gauge(
        "rayzero_rollout_read_prompts",
        "Prompts that the trainer has read, from the job's first one on.",
        _of_rollouts(lambda counts: counts.read),
    ),
    gauge(
        "rayzero_rollout_published_version",
        "Finished steps of the newest weights that roles can have.",
        _of_rollouts(lambda counts: counts.published),
    ),
    gauge(
        "rayzero_rollout_lag_steps",
        "How many steps older the weights that made the newest batch were than the weights that "
        "were trained on it: mean and maximum over its prompts.",
        _of_rollouts(lambda counts: {"mean": counts.lag_mean, "max": counts.lag_max}),
        "statistic",
    ),
    gauge(
        "rayzero_rollout_max_lag_steps",
        "Limit of rayzero_rollout_lag_steps, `rollouts.max_version_lag`.",
        _of_rollouts(lambda counts: counts.max_version_lag),
    ),
    counter(
        "rayzero_rollout_lease_expiries_total",
        "Tasks that a worker held for longer than its role's `hang_timeout_s`, since the buffer "
        "was opened.",
        _by_role("expired"),
        "role",
    ),
    counter(
        "rayzero_rollout_task_wait_seconds_total",
        "Time that a role's workers waited for tasks, the sum over workers, since the buffer was "
        "opened.",
        _by_role("wait_s"),
        "role",
    ),
    gauge(
        "rayzero_rollout_held_bytes",
        "Size of the prompts and samples in the buffer.",
        _of_rollouts(lambda counts: counts.nbytes),
    ),
    gauge(
        "rayzero_rollout_max_bytes",
        "Size beyond which the buffer only begins prompts of the next batch.",
        _of_rollouts(lambda counts: counts.max_bytes),
    ),
)
