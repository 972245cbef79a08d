"""Suite-wide settings: order, scheduling, environment, skips, leak checks."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

# Must precede the first import of torch: many processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A token file in the user's home must not affect test clusters.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# Do not prestart worker processes that no actor will use.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
# Ray's default niceness for workers (15) would starve them next to compute-bound tests. Keep it
# above zero so that Ray's own processes get priority: a raylet that responds late counts as lost.
os.environ.setdefault("RAY_worker_niceness", "3")
# Nobody reads Ray's own metrics, which took a quarter of the CPU time of a cluster of two hosts.
os.environ.setdefault("RAY_enable_metrics_collection", "0")
# A head on a busy machine may take longer to answer than users should wait for a wrong address.
os.environ.setdefault("RAYZERO_PROBE_S", "20")

import pytest
from hypothesis import HealthCheck, settings

from tests.support.leftovers import Run
from tests.support.nccl_like.settings import VARIABLE, NcclLike
from tests.support.processes import preload_libraries
from tests.support.sharing import ByFileScheduling, start_rank

RUN = Run()
_LEAKS = pytest.StashKey[list[str]]()

settings.register_profile(
    "rayzero",
    deadline=None,
    derandomize=True,  # reproducible failures
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("rayzero")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "workers train on a device and a process group that behave as NCCL's (CPU ranks)"
    parser.addoption("--nccl-like", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Prepares all processes that the tests start."""
    if str(config.option.markexpr).startswith("slow"):
        preload_libraries()
    if config.getoption("--nccl-like"):
        os.environ.setdefault(VARIABLE, NcclLike().text())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while test modules are imported, nor afterwards of what they imported:
    such a collection takes 0.2 s, and tests made up to half of their CPU time of them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of test files without a mark that `-m "MARK and not OTHER"` asks for."""
    terms = str(config.option.markexpr).split(" and ")
    wanted = [term for term in terms if not term.startswith("not ")]
    if collection_path.suffix != ".py" or not all(re.fullmatch(r"\w+", term) for term in wanted):
        return None
    text = collection_path.read_text(encoding="utf-8") if wanted != [] else ""
    return True if any(f"mark.{mark}" not in text for mark in wanted) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run fast tests first; skip GPU tests without a GPU."""
    items.sort(key=_order)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch  # deferred: the import takes seconds

        on_cpu = os.environ.get("RAYZERO_GPU_TESTS_ON_CPU") == "1"  # a dry run: benchmarks.gpu
        if not torch.cuda.is_available():
            for item in gpu:
                if not (on_cpu and item.get_closest_marker("gpu_or_cpu")):
                    item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _order(item: pytest.Item) -> tuple[bool, int]:
    is_slow = item.get_closest_marker("slow") is not None
    return is_slow, start_rank(item.nodeid.partition("::")[0]) if is_slow else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFileScheduling | None:
    return ByFileScheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    RUN.record_files(item.nodeid)
    elastic = sys.modules.get("rayzero.engine.comm.elastic_group")
    if elastic is not None and elastic.elastic_group() is not None:  # of a worker in this process
        sys.modules["torch.distributed"].destroy_process_group()


@pytest.hookimpl(trylast=True)  # after xdist's workers have exited
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop the rank processes and fail the run if anything leaked."""
    ranks = sys.modules.get("tests.support.ranks")
    if ranks is not None:
        ranks.stop_ranks()
    if not RUN.is_first:
        session.config.workeroutput["first_seen"] = RUN.first_seen  # type: ignore[attr-defined]
        return
    session.config.stash[_LEAKS] = leaks = RUN.clean_up()
    if leaks and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Merge the file attributions of an xdist worker."""
    for name, test in getattr(node, "workeroutput", {}).get("first_seen", {}).items():
        RUN.first_seen.setdefault(name, test)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # last, because logs of CI are cut at their start
def pytest_terminal_summary(
    terminalreporter: Any, config: pytest.Config
) -> Generator[None, None, None]:
    yield
    for line in config.stash.get(_LEAKS, []):
        terminalreporter.write_line(f"LEFT BEHIND {line}", red=True)
