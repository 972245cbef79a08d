"""The metrics of a job's roles, and their part of its snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayzero.orchestrator.metrics.job_metrics import JobMetrics
from rayzero.orchestrator.metrics.series import counter, gauge
from rayzero.orchestrator.role_facts import RoleFacts


def role_rows(job: JobMetrics) -> dict[str, dict[str, Any]]:
    """The limits, the workers and the faults of each role."""
    rows: dict[str, dict[str, Any]] = {}
    for name, role in job.spec.roles.items():
        facts = job.facts.roles.get(name, RoleFacts())
        least, most = facts.scaled or (role.workers.min, role.workers.most)
        rows[name] = {
            "min": least,
            "max": most,
            "workers": facts.workers,
            "faults": dict(facts.faults),
        }
    return rows


def _workers(job: JobMetrics) -> Mapping[str, float]:
    return {role: row["workers"] for role, row in role_rows(job).items()}


def _limits(job: JobMetrics) -> Mapping[tuple[str, ...], float]:
    rows = role_rows(job).items()
    return {(role, limit): row[limit] for role, row in rows for limit in ("min", "max")}


def _faults(job: JobMetrics) -> Mapping[tuple[str, ...], float]:
    rows = role_rows(job).items()
    return {(role, cause): n for role, row in rows for cause, n in row["faults"].items()}


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
)
