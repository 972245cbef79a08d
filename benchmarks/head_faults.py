"""Losses of a cluster's head, which comes back from its store, and two controllers of one job."""

from __future__ import annotations

import random
import signal
import time

from benchmarks.soak_job import SLOWLY
from benchmarks.soak_target import NotHeldError, Target
from benchmarks.stream_faults import wait_for_streams

AWAY_S = (0.0, 5.0)
"""Beside the steps that are awaited meanwhile, and the new head's start."""
STEPS_ALONE = 3
TIMEOUT_S = 240.0
"""For a head and a controller to start, on a busy machine."""


def lose_head(target: Target, rng: random.Random) -> None:
    """SIGKILL to all processes of the head, which comes back: the ranks train on meanwhile."""
    _lose_head(target, rng, kills_worker=False)


def lose_head_and_worker(target: Target, rng: random.Random) -> None:
    """The same, and a worker dies while it is away."""
    _lose_head(target, rng, kills_worker=True)


def _lose_head(target: Target, rng: random.Random, kills_worker: bool) -> None:
    assert target.head is not None
    wait_for_streams(target)
    controllers, injected = target.controllers(), target.injected()
    ranks = target.wait_for_generation()
    target.control.request(SLOWLY)
    target.head.lose_head()
    if not target.head.has_controller_node:
        target.wait(lambda: not any(map(target.is_alive, controllers)), TIMEOUT_S, "the head's end")
    try:
        step = target.step() + STEPS_ALONE  # unless a fault of the episode stops them, too
        target.wait(
            lambda: target.step() >= step or target.injected() > injected, TIMEOUT_S, f"step {step}"
        )
        if kills_worker:
            target.kill(rng.choice(ranks).pid)
        time.sleep(rng.uniform(*AWAY_S))
    finally:
        target.head.start_head()
    target.mark_fired()
    wait_for_streams(target)
    target.control.take(SLOWLY)
    target.wait_until_repaired(TIMEOUT_S)


def fence_controller(target: Target, rng: random.Random) -> None:
    """The head is lost, but for the job's process, which is paused until the one that Ray starts in
    its place has attached to the agents: then they must obey that one alone."""
    assert target.head is not None
    (old,) = {stream.controller for stream in wait_for_streams(target)}
    target.control.request(SLOWLY)
    target.kill(old, signal.SIGSTOP)
    try:
        target.head.lose_head(but=old)
        target.head.start_head(as_other_machine=True)
        target.mark_fired()
        target.wait(
            lambda: {it.controller for it in wait_for_streams(target)} != {old},
            TIMEOUT_S,
            "another controller",
        )
        (new,) = {stream.controller for stream in wait_for_streams(target)}
    except BaseException:
        target.kill(old)
        raise
    finally:
        target.kill(old, signal.SIGCONT)
    target.wait(lambda: not target.is_alive(old), TIMEOUT_S, "the end of the fenced controller")
    target.control.take(SLOWLY)
    target.wait_until_repaired(TIMEOUT_S)
    if not target.is_alive(new):
        raise NotHeldError(f"{target.text}: controller {new} did not outlive the fenced one")
