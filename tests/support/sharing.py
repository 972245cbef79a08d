"""Distribution of test files over xdist workers."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# These share one Ray head, a session fixture that costs ten CPU seconds.
_SHARED_HEAD = (
    "tests/integration/test_command.py",
    "tests/integration/test_examples.py",
    "tests/integration/test_job_life.py",
    "tests/integration/test_jobs.py",
    "tests/integration/test_prometheus.py",
    "tests/integration/test_ray_train.py",
    "tests/integration/test_rlhf.py",
    "tests/integration/test_roles.py",
    "tests/integration/test_rollouts.py",
    "tests/integration/test_stuck_generators.py",
    "tests/integration/test_worker_group.py",
)
# Slow tests that take minutes, the longest first: starting one late would prolong the whole run.
_START_ORDER = (
    *_SHARED_HEAD,
    "tests/workers/launch/test_script.py",
    "tests/integration/test_guide_sessions.py",
    "tests/huggingface/test_launched_scripts.py",
    "tests/huggingface/test_scripts.py",
    "tests/benchmarks/test_soak.py",
    "tests/integration/test_jobs_on_nodes.py",
    "tests/integration/test_lost_head.py",
    "tests/benchmarks/test_end_to_end.py",
    "tests/integration/test_job_commands.py",
    "tests/integration/test_two_hosts.py",
    "tests/integration/test_chaos.py",
    "tests/workers/launch/test_engines.py",
    "tests/workers/test_recovery.py",
    "tests/deploy/test_image.py",
    "tests/examples/test_hf.py",
    "tests/integration/test_secrets.py",
    "tests/integration/test_nodes.py",
    "tests/examples/test_rlhf_chat.py",
    "tests/engine/planning/test_search.py",
    "tests/benchmarks/test_recovery.py",
    "tests/workers/rollouts/test_jobs.py",
    "tests/workers/test_nccl_like.py",
    "tests/workers/test_loops.py",
    "tests/workers/test_engines.py",
    "tests/workers/launch/test_own_loader.py",
    "tests/integration/test_autoscaler.py",
    "tests/benchmarks/test_plan.py",
    "tests/deepspeed/test_install.py",
    "tests/huggingface/test_lora.py",
)


def start_rank(path: str) -> int:
    """Position of a slow test file in the start order; unlisted files come last."""
    return _START_ORDER.index(path) if path in _START_ORDER else len(_START_ORDER)


class ByFileScheduling(LoadScopeScheduling):
    """Run the tests of a file in one worker, and all files with the shared head in one worker."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "head" if path in _SHARED_HEAD else path

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker another file when it has one test left, which it does not begin without a
        successor. xdist would give it two more, which wait where that test takes a minute."""
        if len(self.workqueue) == 0 or self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)
