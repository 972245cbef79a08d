"""Disruptions of a job with rollouts: of its roles, its size, and its controller."""

from __future__ import annotations

import random
import signal
import time

from benchmarks.soak_rollouts import GENERATORS
from benchmarks.soak_target import REPAIR_TIMEOUT_S, NotHeldError, Target

STOPPED_S = (0.5, 2.5)
"""Below the hang rules of the job and of the roles."""
TIMEOUT_S = 240.0
"""For processes that start, on a busy machine."""


def stop_role_workers(target: Target, rng: random.Random) -> None:
    """Stops some or all workers of roles for a while: the ranks wait at most, and nobody is
    started again for it."""
    target.wait(target.role_workers, TIMEOUT_S, "a role's worker")
    workers = target.role_workers()
    stopped = rng.sample(workers, rng.randint(1, len(workers)))
    try:
        for pid in stopped:
            target.kill(pid, signal.SIGSTOP)
        target.mark_fired()
        time.sleep(rng.uniform(*STOPPED_S))
    finally:
        for pid in stopped:
            target.kill(pid, signal.SIGCONT)


def scale_role(target: Target, rng: random.Random) -> None:
    """One generator, and after a few steps all of them."""
    try:
        target.scale((1, 1), "rollout")
        _await_generators(target, 1)
        target.mark_fired()
        target.wait_for_step(target.step() + rng.randint(1, 5))
    finally:
        target.scale((1, GENERATORS), "rollout")
    _await_generators(target, GENERATORS)


def _await_generators(target: Target, count: int) -> None:
    """Until so many run. The job's status says it: only there they have a number."""
    target.wait(
        lambda: target.status().roles["rollout"].workers == count,
        TIMEOUT_S,
        f"{count} generators",
    )


def scale_ranks(target: Target, rng: random.Random) -> None:
    """One or two ranks, and after a few steps all of them."""
    all_ranks = target.workers_expected
    fewer = rng.randint(1, all_ranks - 1)
    try:
        target.scale((1, fewer))
        target.wait(
            lambda: {state.world_size for state in target.ranks()} == {fewer},
            TIMEOUT_S,
            f"{fewer} ranks",
        )
        target.mark_fired()
        target.wait_for_step(target.step() + rng.randint(1, 5))
    finally:
        target.scale((1, all_ranks))
    target.wait_until_repaired(TIMEOUT_S)


def kill_controller(target: Target, rng: random.Random) -> None:
    """Kills the job's process. The one that Ray starts continues with the others, but for those
    that do not answer."""
    (controller,) = target.controllers()
    old = {*target.workers(), *target.role_workers(), *target.vaults()}
    stopped = rng.sample(target.role_workers(), rng.randint(0, len(target.role_workers())))
    for pid in stopped:
        target.kill(pid, signal.SIGSTOP)
    target.kill(controller)
    target.wait(lambda: not target.is_alive(controller), REPAIR_TIMEOUT_S, "its end")
    target.mark_fired()
    target.wait(
        lambda: not any(map(target.is_alive, stopped)), TIMEOUT_S, "the end of stopped ones"
    )
    target.wait_until_repaired(TIMEOUT_S)
    if not any(target.is_alive(pid) for pid in old.difference(stopped)):
        raise NotHeldError(f"{target.text}: no process has outlived its controller")
