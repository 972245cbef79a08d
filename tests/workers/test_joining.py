"""A worker joins its process group before it calls the training function: a peer may be missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from rayzero.workers.messages import Finished, Heartbeat, Joined, Stopped
from tests.support.nccl_like.settings import NcclLike
from tests.workers import recovery_jobs
from tests.workers.local_workers import LocalWorkers
from tests.workers.recovery_checks import STEPS, check_results
from tests.workers.support import mirrored_setup

pytestmark = pytest.mark.slow
PROMPT_S = 25.0
"""Far below the limit of a join, 70 s here, and of a test."""


@pytest.fixture
def start_workers(tmp_path) -> Iterator[Callable[[NcclLike | None], LocalWorkers]]:
    groups: list[LocalWorkers] = []

    def start(nccl_like: NcclLike | None) -> LocalWorkers:
        entrypoint, config = "tests.workers.recovery_jobs:train", recovery_jobs.engine_config(3)
        spec = mirrored_setup(tmp_path, entrypoint, steps=STEPS, engine_config=config)
        groups.append(LocalWorkers(spec, 2, nccl_like))
        return groups[-1]

    yield start
    for local in groups:
        local.close()


@pytest.mark.parametrize("command", ["fence", "stop"])
@pytest.mark.parametrize("nccl_like", [None, NcclLike()], ids=["gloo", "nccl_like"])
def test_wait_for_a_missing_peer_is_ended(start_workers, nccl_like: NcclLike | None, command: str):
    """The next generation forms in a new process."""
    local = start_workers(nccl_like)
    local.form(1, [0, 1], recipients=[0])

    def is_joining(message: object) -> bool:
        return isinstance(message, Heartbeat) and message.phase == "join" and message.silent_s > 0.3

    local.wait(0, is_joining)
    started_s = time.monotonic()
    local.workers[0].call(command, 1)
    assert isinstance(local.wait_end(0, 1), Stopped), local.texts(0)
    assert time.monotonic() - started_s < PROMPT_S
    assert not any(isinstance(message, Joined) for message in local.seen[0])
    local.form(2, [0, 1])
    for index in (0, 1):
        assert isinstance(local.wait_end(index, 2), Finished), local.texts(index)
    check_results(local)
