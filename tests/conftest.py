"""Settings of the whole suite: order, processes, environment, skips, what may be left behind."""

from __future__ import annotations

import os
import sys
from typing import Any

# Before torch is imported anywhere: many processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A token left in the user's home must not decide whether a test cluster starts.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# Nor are processes wanted on every node that no actor of ours will use.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
# Ray's workers give way to everybody (15): beside a test that computes they would hardly run. To
# Ray's own processes they do give way, a little: a node that starts or answers late is lost.
os.environ.setdefault("RAY_worker_niceness", "3")

import pytest
from hypothesis import HealthCheck, settings

from tests.support.leftovers import Run
from tests.support.sharing import ByFile, place

RUN = Run()
_LEFT = pytest.StashKey[list[str]]()

settings.register_profile(
    "rayzero",
    deadline=None,
    derandomize=True,  # the same draws every time: what fails, fails for everybody
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("rayzero")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first, so that a plain mistake is seen at once; no GPU tests without a GPU."""
    items.sort(key=_order)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch  # only when a test asks for it: it costs seconds

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _order(item: pytest.Item) -> tuple[bool, int]:
    is_slow = item.get_closest_marker("slow") is not None
    return is_slow, place(item.nodeid.partition("::")[0]) if is_slow else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    RUN.note(item.nodeid)


@pytest.hookimpl(trylast=True)  # xdist's workers are gone by then
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Kills the rank processes, if any test started them; then nothing may be left."""
    ranks = sys.modules.get("tests.support.ranks")
    if ranks is not None:
        ranks.stop_ranks()
    if not RUN.is_first:
        session.config.workeroutput["seen"] = RUN.seen  # type: ignore[attr-defined]
        return
    session.config.stash[_LEFT] = left = RUN.end()
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process of xdist's tells which test each file came with."""
    for name, test in getattr(node, "workeroutput", {}).get("seen", {}).items():
        RUN.seen.setdefault(name, test)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for line in config.stash.get(_LEFT, []):
        terminalreporter.write_line(f"LEFT BEHIND {line}", red=True)
