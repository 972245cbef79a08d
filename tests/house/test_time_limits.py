"""Every constant time in the product, with the reason why no model, however slow, can break it.

What depends on a model is derived from a setting (`recovery.patience_s`,
`workers.start_timeout_s`, `checkpoint.grace_period_s`), from sizes, or from measured times.
"""

from __future__ import annotations

import ast
import re

from tests.house.source import packages

REASONS = {
    "how often something is looked at, or how long changes are collected: only a delay": """
        workers.worker: FENCE_INTERVAL_S
        workers.authenticated: _CHECK_S
        engine.data.loader: _SIGN_INTERVAL_S
        engine.data.loader_pool: _CHECK_INTERVAL_S
        engine.data.streams.sources.index: PROGRESS_S
        engine.data.streams.cache: CHECK_INTERVAL_S
        engine.data.streams.sources.files: _FIRST_PAUSE_S _LONGEST_PAUSE_S
        workers.rollouts.buffer_client: POLL_S _CONNECT_S _RETRY_S
        workers.rollouts.server: _EXPIRY_S _ASK_AGAIN_S
        workers.vault.server: _PING_INTERVAL_S
        workers.vault.mappings: _POLL_S
        workers.weights.reader: POLL_S _TRY_AGAIN_S
        workers.state_copy: _POLL_S
        workers.process_group: POLL_INTERVAL_S
        workers.ledger_writer: RETRY_S
        workers.step_report: GPU_INTERVAL_S
        orchestrator.control.calls: EXIT_POLL_S
        orchestrator.control.node_health: HEALTH_POLL_S
        workers.vault.node_probe: _ROUND_CPU_S
        orchestrator.control.role_pool: CHECK_INTERVAL_S
        orchestrator.control.rollouts: COUNT_INTERVAL_S
        orchestrator.top.follow: REFRESH_S LINE_INTERVAL_S
        orchestrator.journal.entries: DEFAULT_STEP_INTERVAL_S
        orchestrator.aio: WORKER_POLL_S
        orchestrator.job.client: LOG_POLL_S
        orchestrator.job.stored_log: FOLLOW_POLL_S
        orchestrator.job.api: _RETRY_INTERVAL_S
        orchestrator.job.process: _SWITCH_INTERVAL_S
        orchestrator.job.actor: _REPLY_FLUSH_S _START_POLL_S
        orchestrator.job.save_summary: SUMMARY_RETRY_S
        orchestrator.cluster.leftovers: _ASK_PAUSE_S
        orchestrator.job.prestop: _POLL_S
        orchestrator.job.handle: LONG_POLL_S _RETRY_PAUSE_S
        orchestrator.job.lease: CLAIM_POLL_S
        orchestrator.job.recorder: BATCH_DELAY_S _LOG_FLUSH_INTERVAL_S
        orchestrator.metrics.http_server: CPU_BURST_S _CPU_CHECK_S _MAX_THROTTLE_S
        orchestrator.metrics.endpoint: _POLL_S _SLACK_S
        orchestrator.metrics.trackers: FLUSH_INTERVAL_S
        orchestrator.metrics.jobs_page: LIST_INTERVAL_S
        orchestrator.metrics.telemetry: SNAPSHOT_INTERVAL_S HISTORY_INTERVAL_S
        orchestrator.console: STEP_INTERVAL_S
        orchestrator.background_writer: RETRY_DELAYS_S _CLOSING_RETRY_S
        orchestrator.control.vaults: BEAT_WAIT_S REOPEN_BACKOFF_S CLOSE_UNUSED_AFTER_S
        workers.vault.replicas: RETRY_BACKOFF_S
        orchestrator.control.inbox: DISPATCH_SLICE_S
        orchestrator.control.generation: FLUSH_SLICE_S
        orchestrator.control.hang_detector: CHECK_INTERVAL_S LOOK_AGAIN_S REPORT_AFTER_S
        workers.vault.process_watch: LOOK_INTERVAL_S _MAX_GAP_S
        orchestrator.control.reconfigure: _LOOK_S SAMPLES_WAIT_S
        orchestrator.control.elastic: JOIN_BATCH_S DRAIN_POLL_INTERVAL_S
        orchestrator.control.replacements: REPLACE_DELAY_S
        orchestrator.control.checkpoints: WRITE_RETRY_BACKOFF_S
        orchestrator.policies.placement: MAX_BACKOFF_S
        orchestrator.cli.jobs: STOP_POLL_S
        orchestrator.cli.ckpt: PROGRESS_INTERVAL_S
        orchestrator.job.stop_signals: _SIGNAL_POLL_S
        orchestrator.cluster.actor_pool: _MAX_START_BACKOFF_S
        orchestrator.cluster.node_links: SILENT_S RETRY_S TICK_S
            READ_SLICE_S
        orchestrator.cluster.vault_group: _UNAVAILABLE_PAUSE_S
        workers.agent.node_agent: BEAT_S
        workers.agent.local_workers: REPORTS_DELAY_S QUIET_DELAY_S _BIND_RETRY_S
        workers.agent.message_sender: BEAT_S _RETRY_S
        orchestrator.cluster.ray_api: _PING_INTERVAL_S
        orchestrator.cluster.addresses: _LEAST_WAIT_S
        orchestrator.cluster.worker_group: _ACQUIRE_INTERVAL_S _FILL_INTERVAL_S
            _EXTRA_WORKER_WAIT_S WAITING_INTERVAL_S _PING_INTERVAL_S
    """,
    "the end of a thread or process that has nothing left to do; it is left behind otherwise": """
        orchestrator.control.roles: END_LIMIT_S
        workers.authenticated: _CLOSE_S
        engine.comm.elastic_group: END_LIMIT_S
        engine.data.loader_process: _TIMEOUT_S
        engine.data.prefetch: _JOIN_TIMEOUT_S
        engine.comm.gloo_p2p: EXIT_LIMIT_S
        workers.worker: DEVICE_EXIT_S
        workers.vault.server: _STOP_TIMEOUT_S
        workers.vault.health: _STOP_TIMEOUT_S
        workers.probe_process: _KILL_TIMEOUT_S
        orchestrator.cluster.local_cluster: _STOP_TIMEOUT_S
        orchestrator.job.handle: FOLLOWER_CLOSE_S LOG_READ_S
        orchestrator.job.api: EXIT_TIMEOUT_S
        orchestrator.job.actor: FETCH_LINGER_S UNWATCHED_LINGER_S LOG_READ_LINGER_S
            _LOG_READER_IDLE_S _RECENT_POLL_S
        orchestrator.job.lease: RELEASE_TIMEOUT_S
        orchestrator.metrics.endpoint: MAX_END_WAIT_S STOP_TIMEOUT_S
        orchestrator.metrics.trackers: END_LIMIT_S
        orchestrator.control.failures: KILL_TIMEOUT_S
        orchestrator.cluster.worker_group: _KILL_TIMEOUT_S
        orchestrator.cluster.ray_api: GONE_TIMEOUT_S
    """,
    "the reply of a process without a model: a head, a job's process, a vault, a browser": """
        workers.chaos.node: _COMMAND_TIMEOUT_S
        workers.vault.client: _CALL_TIMEOUT_S
        workers.vault.peers: _STACK_TIMEOUT_S
        workers.vault.vault: STORE_WAIT_S
        workers.prestop: _RPC_TIMEOUT_S
        workers.fork_server: REQUEST_TIMEOUT_S
        orchestrator.top.follow: _HTTP_TIMEOUT_S LOST_CONTACT_S
        orchestrator.job.client: CALL_TIMEOUT_S LOG_TASK_TIMEOUT_S
        orchestrator.job.actor: JOURNAL_WAIT_S RECORD_TIMEOUT_S START_WAIT_S
        orchestrator.job.prestop: _CALL_TIMEOUT_S
        orchestrator.job.handle: ANSWER_MARGIN_S UNAVAILABLE_LIMIT_S _ACKNOWLEDGE_TIMEOUT_S
        orchestrator.metrics.http_server: CONNECTION_LIFETIME_S
        orchestrator.metrics.endpoint: OWNER_TIMEOUT_S
        orchestrator.control.hang_detector: STACK_TIMEOUT_S INSPECT_TIMEOUT_S
        orchestrator.control.chaos: VAULT_REPLY_TIMEOUT_S
        orchestrator.cli.run: ACCEPT_TIMEOUT_S
        orchestrator.cluster.addresses: DEFAULT_PROBE_S
        orchestrator.cluster.command_client: _REPLY_TIMEOUT_S
        orchestrator.cluster.vault_group: _START_TIMEOUT_S
        orchestrator.doctor.probes: _ANSWER_S
        orchestrator.control.elastic: HEAD_LIMIT_S
        orchestrator.cluster.node_links: CAUSE_WAIT_S
        workers.agent.node_agent: _ATTACH_TIMEOUT_S
        workers.actor: _AGENT_WAIT_S
    """,
    "of a process that uses no CPU, or the least of a limit that is learned from steps": """
        workers.vault.process_watch: STALLED_S
        orchestrator.policies.hang_limits: LEAST_LIMIT_S
    """,
    "copies that the device's queue has already, after whatever they wait for was aborted": """
        workers.vault.client: _DEVICE_TIMEOUT_S
    """,
    "the largest value of a setting, or of a time in a file": """
        orchestrator.spec: MAX_LEASE_S
        orchestrator.cluster.addresses: MAX_PROBE_S
        orchestrator.numbers: MAX_UNIX_S
    """,
    "a default of Ray, which is compared with a setting": """
        orchestrator.doctor.probes: RAY_RECONNECT_S
    """,
    "the default of an argument": """
        engine.data.streams.api: _READ_TIMEOUT_S
        engine.data.streams.sources.file_blocks: RETRY_S
        data.ray_blocks: TIMEOUT_S
    """,
    "one chunk of a fixed size": """
        engine.offload.nvme_store: IO_LIMIT_S
    """,
    "added to a setting or to a time that grows with the size of the state": """
        workers.vault.client: _RESERVE_TIMEOUT_S _FETCH_TIMEOUT_S
        workers.vault.actor: _FETCH_TIMEOUT_S
        orchestrator.job.handle: STOP_MARGIN_S
        orchestrator.control.inbox: SILENCE_GRACE_S
        workers.vault.replicas: TRANSFER_GRACE_S
        orchestrator.control.calls: LEAST_REPLY_LIMIT_S
        orchestrator.plan: DISK_MARGIN_S
    """,
    "a choice of what is stored: older by one step, of what the vaults hold": """
        orchestrator.control.job_stop: LEAVE_DELAY_S
    """,
    "tells causes apart, of what has failed already; no failure follows from it": """
        workers.group_sockets: _SELF_CONNECT_S
        orchestrator.policies.hang: EARLY_RETURN_GRACE_S _UNRESPONSIVE_S
        orchestrator.policies.failure: DETECTION_S
        orchestrator.policies.stragglers: MIN_DIFFERENCE_S
        orchestrator.control.failures: COLLECTIVE_GRACE_S
        orchestrator.job.claims: CLOCK_SLACK_S
        orchestrator.top.board: SILENT_RANK_S
    """,
    "the doctor's probes, and the lifetime and resolution of what is shown": """
        orchestrator.doctor.diagnose: _SLOW_WRITE_S
        orchestrator.doctor.collect: _TORCH_TIMEOUT_S _CLUSTER_TIMEOUT_S _STORAGE_TIMEOUT_S
        orchestrator.doctor.probes: _NODE_LIMIT_S _NODES_LIMIT_S
        orchestrator.job.ended_jobs: MAX_RECORD_AGE_S
        orchestrator.job.command_server: _FOLLOW_LIMIT_S
        orchestrator.metrics.job_metrics: STEP_BUCKETS_S RECOVERY_BUCKETS_S CHECKPOINT_BUCKETS_S
        orchestrator.metrics.endpoint: MAX_REGULAR_INTERVAL_S
    """,
}


def listed() -> dict[str, str]:
    """Reasons by the constant's full name."""
    names, module = {}, ""
    for reason, text in REASONS.items():
        for word in text.split():
            if word.endswith(":"):
                module = f"rayzero.{word[:-1]}"
            else:
                assert f"{module}.{word}" not in names
                names[f"{module}.{word}"] = reason
    return names


def constants() -> set[str]:
    """Constants of modules whose name says that they are times."""
    names = set()
    for module in packages():
        for node in module.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            for target in targets:
                if isinstance(target, ast.Name) and re.fullmatch(
                    r"_?[A-Z][A-Z0-9_]*(?<!_PER)_S", target.id
                ):
                    names.add(f"{module.name}.{target.id}")
    return names


def literal_timeouts() -> set[str]:
    """Arguments of calls that are a limit and a number."""
    return {
        f"{module.name}:{keyword.value.lineno}"
        for module in packages()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg in ("timeout", "timeout_s", "limit_s")
        and isinstance(keyword.value, ast.Constant)
        and isinstance(keyword.value.value, int | float)
    }


def test_every_constant_time_has_a_reason():
    assert constants() == listed().keys()


def test_no_limit_is_a_number_in_a_call():
    assert literal_timeouts() == set()
