"""Settings of the whole suite: order, environment, skips."""

from __future__ import annotations

import os
import sys

# Before torch is imported anywhere: many processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A token left in the user's home must not decide whether a test cluster starts.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import pytest
from hypothesis import HealthCheck, settings

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
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch  # only when a test asks for it: it costs seconds

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_sessionfinish() -> None:
    """Kills the rank processes, if any test started them."""
    ranks = sys.modules.get("tests.support.ranks")
    if ranks is not None:
        ranks.stop_ranks()
