"""How test files are shared out over xdist's processes."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

# Their tests share one Ray head, a session's fixture, which costs ten seconds of a core.
_ON_ONE_HEAD = (
    "tests/integration/test_command.py",
    "tests/integration/test_job_life.py",
    "tests/integration/test_jobs.py",
    "tests/integration/test_metrics.py",
    "tests/integration/test_prometheus.py",
    "tests/integration/test_worker_group.py",
)
# The slow tests that take minutes, in order: one begun late would be waited for at the end.
_FIRST = (
    *_ON_ONE_HEAD,
    "tests/integration/test_job_commands.py",
    "tests/integration/test_jobs_on_nodes.py",
    "tests/workers/test_recovery.py",
    "tests/integration/test_end_to_end.py",
    "tests/integration/test_chaos.py",
    "tests/integration/test_nodes.py",
    "tests/examples/test_bert_and_ddp.py",
    "tests/engine/test_hosts.py",
    "tests/integration/test_secrets.py",
)


def place(path: str) -> int:
    """In the order of the slow tests' files; those that are not known follow."""
    return _FIRST.index(path) if path in _FIRST else len(_FIRST)


class ByFile(LoadScopeScheduling):
    """A file's tests run in one process, and so do those of the files on one head."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "head" if path in _ON_ONE_HEAD else path
