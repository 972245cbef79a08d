"""A worker builds its engine and loads its state while a thread of it joins the group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rayzero.workers.messages import (
    Crashed,
    Finished,
    Joined,
    LogLine,
    Restored,
    Stopped,
)
from tests.support.nccl_like.settings import NcclLike
from tests.workers import recovery_jobs
from tests.workers.local_workers import LocalWorkers
from tests.workers.support import mirrored_setup
from tests.workers.test_recovery import STEPS, check_results, wait_for_lost_worker

pytestmark = pytest.mark.slow
PROMPT_S = 25.0
"""Far below the limit of a join, 70 s here, and of a test."""

StartWorkers = Callable[..., LocalWorkers]


@pytest.fixture
def start_workers(tmp_path) -> Iterator[StartWorkers]:
    groups: list[LocalWorkers] = []

    def make(function: str, count: int, nccl_like: NcclLike | None, **changes: Any) -> LocalWorkers:
        entrypoint = f"tests.workers.joining_jobs:{function}"
        defaults = {"steps": STEPS, "engine_config": recovery_jobs.engine_config(3)}
        spec = mirrored_setup(tmp_path, entrypoint, **(defaults | changes))
        groups.append(LocalWorkers(spec, count, nccl_like))
        return groups[-1]

    yield make
    for local in groups:
        local.close()


def fence(local: LocalWorkers, generation: int, *indices: int) -> None:
    started_s = time.monotonic()
    for index in indices:
        local.workers[index].call("fence", generation)
    for index in indices:
        assert isinstance(local.wait_end(index, generation), Stopped), local.texts(index)
    assert time.monotonic() - started_s < PROMPT_S


def position(local: LocalWorkers, index: int, kind: type, generation: int) -> int:
    (at,) = [
        number
        for number, message in enumerate(local.seen[index])
        if isinstance(message, kind) and message.generation == generation
    ]
    return at


def test_state_is_loaded_before_the_group_is_there(start_workers):
    """On NCCL: with a state to load, and a buffer that none contains, the build needs no peer."""
    fault = 'kill(rank=1, step=5, phase="backward")'
    local = start_workers("train", 3, NcclLike(), faults=(fault,))
    local.form(1, [0, 1, 2])
    assert wait_for_lost_worker(local) == 1
    fence(local, 1, 0, 2)
    local.form(2, [0, 2], local.slots(1, world_size=3))
    for index in (0, 2):
        assert isinstance(local.wait_end(index, 2), Finished), local.texts(index)
        assert position(local, index, Joined, 2) < position(local, index, Restored, 2)
    check_results(local)


@pytest.mark.parametrize("nccl_like", [None, NcclLike()], ids=["gloo", "nccl_like"])
def test_peer_is_missing_while_the_user_builds(start_workers, nccl_like: NcclLike | None):
    """The wait is interrupted, the user's error is the user's, the user's sockets stay open, and
    the next generation forms in new processes."""
    local = start_workers("use_group_in_build", 2, nccl_like)
    local.form(1, [0, 1], recipients=[0])
    local.wait(0, lambda message: isinstance(message, LogLine) and "asks" in message.text)
    fence(local, 1, 0)
    folder = Path(local.setup.output_dir)
    (folder / "fenced").touch()
    deadline_s = time.monotonic() + 20
    while not (folder / "kept-0").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert (folder / "kept-0").read_bytes() == b"open"
    started_s = time.monotonic()
    local.form(2, [0, 1], recipients=[0])
    crash = local.wait_end(0, 2)
    assert isinstance(crash, Crashed), local.texts(0)
    assert (crash.kind, "in the constructor" in crash.error) == ("user", True)
    assert time.monotonic() - started_s < PROMPT_S
    local.form(3, [0, 1])
    for index in (0, 1):
        assert isinstance(local.wait_end(index, 3), Finished), local.texts(index)
    check_results(local)
