"""Panels about a job's roles and its rollouts."""

from __future__ import annotations

from tools.dashboard.faults import BUDGET_THRESHOLDS
from tools.dashboard.panels import (
    JOB_SELECTOR,
    DashboardRow,
    Panel,
    Query,
    gauge_query,
    rate_query,
)

ROLES_ROW = DashboardRow(
    "Roles",
    (
        Panel(
            "Workers of roles",
            "Workers whose function runs, between the limits of their role.",
            "none",
            (
                gauge_query("rayzero_role_workers", "{{role}}"),
                gauge_query("rayzero_role_worker_limits", "{{role}}, {{limit}}"),
            ),
        ),
        Panel(
            "Faults of roles",
            "Lost and hung workers and exceptions, by cause. A worker is started again alone.",
            "none",
            (gauge_query("rayzero_role_faults_total", "{{role}}: {{cause}}"),),
            stacked=True,
        ),
        Panel(
            "Fault budgets of roles",
            "Faults in the window, as a share of the role's budget.",
            "percentunit",
            (
                Query(
                    f"rayzero_role_faults_in_window{{{JOB_SELECTOR}}}"
                    f" / rayzero_role_fault_budget{{{JOB_SELECTOR}}}",
                    "{{role}}",
                ),
            ),
            thresholds=BUDGET_THRESHOLDS,
            kind="gauge",
            maximum=1,
        ),
        Panel(
            "Tasks",
            "Tasks that no worker of a role has, tasks that one has, and prompts that are ready.",
            "none",
            (
                gauge_query("rayzero_rollout_tasks", "{{role}}: {{state}}"),
                gauge_query("rayzero_rollout_ready_prompts", "ready"),
            ),
        ),
        Panel(
            "Who waits for whom",
            "Share of the time that the ranks wait for samples; workers of a role, on average, "
            "that wait for tasks and for weights.",
            "none",
            (
                Query(
                    f'rate(rayzero_time_seconds_total{{{JOB_SELECTOR},cause="data"}}'
                    "[$__rate_interval])",
                    "ranks, for samples",
                ),
                rate_query("rayzero_rollout_task_wait_seconds_total", "{{role}}, for tasks"),
                rate_query("rayzero_role_weights_wait_seconds_total", "{{role}}, for weights"),
            ),
        ),
        Panel(
            "Versions of the weights",
            "Finished steps: of the job, of the newest weights that roles can have, and of the "
            "oldest that one of a role's workers has.",
            "none",
            (
                gauge_query("rayzero_step", "step"),
                gauge_query("rayzero_rollout_published_version", "published"),
                gauge_query("rayzero_role_oldest_version", "{{role}}, oldest"),
            ),
        ),
        Panel(
            "Lag of the samples",
            "Steps that the weights of the newest batch's samples were older than those trained on "
            "them, and the most that is allowed.",
            "none",
            (
                gauge_query("rayzero_rollout_lag_steps", "{{statistic}}"),
                gauge_query("rayzero_rollout_max_lag_steps", "allowed"),
            ),
        ),
        Panel(
            "Reported values",
            "What roles pass to ctx.report: the mean.",
            "none",
            (gauge_query("rayzero_role_value", "{{role}}: {{name}}"),),
        ),
        Panel(
            "Tokens of roles",
            "Tokens a second that the workers of a role report.",
            "none",
            (rate_query("rayzero_role_tokens_total", "{{role}}"),),
        ),
        Panel(
            "Prompts",
            "Prompts that the ranks read, and tasks that a worker held for longer than its role's "
            "limit, a second.",
            "none",
            (
                Query(
                    f"deriv(rayzero_rollout_read_prompts{{{JOB_SELECTOR}}}[$__rate_interval])",
                    "read",
                ),
                rate_query("rayzero_rollout_lease_expiries_total", "{{role}}: given again"),
            ),
            width=12,
        ),
        Panel(
            "Buffer",
            "Prompts and samples that the buffer holds, and beyond which it begins no more.",
            "bytes",
            (
                gauge_query("rayzero_rollout_held_bytes", "held"),
                gauge_query("rayzero_rollout_max_bytes", "at most"),
            ),
            width=12,
        ),
    ),
)
