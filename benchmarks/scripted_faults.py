"""Disruptions through the soak test's training function, and of the job's folder."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.soak_control import parse_disruption
from benchmarks.soak_target import NotHeldError, Target
from rayzero.workers.chaos.inject import FAULT_RECORD_FILE

START_TIMEOUT_S = 240.0
SWALLOW_TIMEOUT_S = 60.0
"""Many times the job's patience."""
ATTEMPTS = 5
STEPS_WITHOUT = 2
"""That a rank finishes without one that was killed, at least, where it was repaired."""
STEPS_AHEAD = 4
"""From a request to the step in which all ranks find it."""
READ_ONLY_S = (0.3, 1.5)
"""A ledger waits for its storage for half of the job's patience, which is 10 s."""
# Staged: a mount that has writers already cannot become read-only.
_MAKE_READ_ONLY = """
mount --bind "$1" "$2"
mount -o remount,ro,bind "$2"
mount --bind "$1/$3" "$2/$3"
mount --rbind "$2" "$1"
"""
_UNDO_READ_ONLY = """
set +e
umount -l "$1"
umount -l "$2"
! mountpoint -q "$1"
"""


def kill_in_long_step(target: Target, rng: random.Random) -> None:
    """SIGKILL to one rank while all are inside one call; the survivors must live."""
    step, pids = _enter_long_step(target)
    injected = target.injected()
    victim = rng.choice(sorted(pids))
    target.mark_fired()
    target.kill(victim)
    target.wait_for_step(step + 1)
    dead = [pid for pid in pids - {victim} if not target.is_alive(pid)]
    if dead and target.injected() == injected:
        raise NotHeldError(f"{target.text}: processes {dead} survived {victim}, but were ended")


def _enter_long_step(target: Target) -> tuple[int, set[int]]:
    """Lets all ranks enter a long call in the same step. Returns it, and their processes."""
    for _ in range(ATTEMPTS):  # another fault may end the generation meanwhile
        pids = {state.pid for state in target.wait_for_generation()}
        step = target.step() + STEPS_AHEAD
        mark = f"long_step-{step}"
        target.control.request("long_step", str(step))
        try:
            target.wait(
                lambda: pids <= target.control.taken_by(mark) or target.step() > step,  # noqa: B023
                START_TIMEOUT_S,
                f"a long step {step}",
            )
        finally:
            target.control.take("long_step")
        if pids <= target.control.taken_by(mark) and all(map(target.is_alive, pids)):
            return step, pids
    raise NotHeldError(f"{target.text}: no generation stayed for {STEPS_AHEAD} steps")


def kill_starting(target: Target, rng: random.Random) -> None:
    """SIGKILL to a worker that imports the training function, or that joins its first generation:
    one of the first ones, or the replacement of another one."""
    point = rng.choice(["importing", "joining"])
    before = target.control.taken_by(point)
    _, step = parse_disruption(target.text) or ("", 0)
    if step > 0:
        victim = rng.choice(target.wait_for_generation())
        target.control.request(point)
        target.kill(victim.pid)
    else:
        target.control.request(point)
    target.wait(
        lambda: target.control.taken_by(point) > before, START_TIMEOUT_S, f"a death while {point}"
    )
    target.mark_fired()


def swallow(target: Target, rng: random.Random) -> None:
    """A rank's training function catches every exception, also one by which it must leave after the
    death of another rank: the hang rule must end it then. If the engine raises none, it trains
    on."""
    victim, swallower = rng.sample(target.wait_for_generation(), 2)
    request = f"swallow-{swallower.pid}"
    target.control.request(request)
    target.wait(lambda: target.control.taken_by(request), START_TIMEOUT_S, "a rank that swallows")
    target.mark_fired()
    target.kill(victim.pid)
    step = target.step() + STEPS_WITHOUT + 1  # the victim may have been about to end one
    target.wait(
        lambda: not target.is_alive(swallower.pid) or _has_trained(target, swallower.pid, step),
        SWALLOW_TIMEOUT_S,
        f"the end of process {swallower.pid}, which does not leave, or its step {step}",
    )


def _has_trained(target: Target, pid: int, step: int) -> bool:
    return any(state.pid == pid and state.step >= step for state in target.ranks())


def make_folder_read_only(target: Target, rng: random.Random) -> None:
    """The job's folder is read-only for a while, except for the record of injected faults."""
    target.wait(target.workers, START_TIMEOUT_S, "a worker")  # until then, a job may refuse it
    namespace = target.controllers()[-1]
    (target.job_dir / FAULT_RECORD_FILE).touch()
    staged = target.control.folder / "read-only"
    staged.mkdir(exist_ok=True)
    folders = (str(target.job_dir), str(staged), FAULT_RECORD_FILE)
    try:
        _run_in(namespace, _MAKE_READ_ONLY, *folders)
        target.mark_fired()
        time.sleep(rng.uniform(*READ_ONLY_S))
    finally:
        _run_in(namespace, _UNDO_READ_ONLY, *folders)


def why_not_read_only() -> str:
    """Why this machine cannot mount a folder read-only; empty if it can."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a" / "b").mkdir(parents=True)
        folders = (f"{folder}/a", f"{folder}/b", "b")
        Path(folder, "b").mkdir()
        try:
            try:
                _run_in(os.getpid(), _MAKE_READ_ONLY, *folders)
            finally:
                _run_in(os.getpid(), _UNDO_READ_ONLY, *folders)
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or str(error)
            return f"a folder cannot be mounted read-only: {output.strip()}"
    return ""


def _run_in(namespace_pid: int, script: str, *arguments: str) -> None:
    """Runs a shell script in the mount namespace of a process."""
    own, other = (Path(f"/proc/{pid}/ns/mnt").readlink() for pid in ("self", namespace_pid))
    prefix = [] if own == other else ["nsenter", "-t", str(namespace_pid), "-m"]
    command = [*prefix, "sh", "-ec", script, "sh", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
