"""Faults that the soak test inflicts on a job from outside, beside those of the fault language."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks import head_faults, hostile, role_disruptions, stream_faults
from benchmarks.scripted_faults import (
    kill_in_long_step,
    kill_starting,
    make_folder_read_only,
    swallow,
    why_not_read_only,
)
from benchmarks.soak_control import parse_disruption
from benchmarks.soak_target import JobEndedError, NotHeldError, Target


def _no_reason() -> str:
    return ""


@dataclass(frozen=True)
class Disruption:
    """One kind.

    Args:
        inflict: inflicts it once, and undoes what the job must not find later. It may return before
            the job is repaired; it calls `Target.mark_fired` where the effect is earlier than its
            return. Raises NotHeldError if the job does not bear it.
        min_nodes: worker nodes that it needs.
        needs_head: whether it loses the head, which only comes back in a cluster of one node.
        leaves_cluster: whether the job goes on in another one, whose head is never lost.
        per_episode: at most so many in an episode; 0: any number.
        at_start: may be inflicted before the first step, too.
        at_end: may be inflicted before the last step, too.
        needs_repair: whether workers are lost by it.
        only: the kinds of jobs that it is for; empty: all.
        why_not: why this machine cannot; empty if it can.
    """

    name: str
    description: str
    inflict: Callable[[Target, random.Random], None]
    min_nodes: int = 1
    needs_head: bool = False
    leaves_cluster: bool = False
    per_episode: int = 0
    at_start: bool = False
    at_end: bool = False
    needs_repair: bool = True
    only: tuple[str, ...] = ()
    why_not: Callable[[], str] = _no_reason


_KINDS = (
    Disruption(
        "long_step",
        "SIGKILL to a worker while all ranks are inside one long call",
        kill_in_long_step,
    ),
    Disruption(
        "kill_starting",
        "SIGKILL to a worker whose process starts or joins",
        kill_starting,
        at_start=True,
    ),
    Disruption(
        "swallow",
        "a training function catches the exception by which it must leave",
        swallow,
        per_episode=1,  # a second time in the same way is the user's error
    ),
    Disruption(
        "read_only_folder",
        "the job's folder is read-only for a while",
        make_folder_read_only,
        at_start=True,
        at_end=True,
        needs_repair=False,
        why_not=why_not_read_only,
    ),
    Disruption(
        "attack_store",
        "a stranger lists, changes and deletes keys of the rendezvous store, and floods it",
        hostile.attack_store,
    ),
    Disruption(
        "corrupt_replica",
        "flipped bytes in the vaults' newest copies, which are then needed",
        hostile.corrupt_replica,
    ),
    Disruption(
        "corrupt_header",
        "a damaged manifest or header of the newest checkpoint, which is then needed",
        hostile.corrupt_header,
    ),
    Disruption(
        "pause_controller",
        "SIGSTOP to the controller until another one has taken the job over",
        hostile.pause_controller,
        leaves_cluster=True,
        per_episode=1,
        needs_repair=False,
        why_not=hostile.why_no_second_submission,
    ),
    Disruption(
        "lose_nodes",
        "SIGKILL to all Ray processes of one node, then of the other",
        hostile.lose_nodes,
        min_nodes=2,
    ),
    Disruption(
        "cut_stream",
        "the TCP connection between the controller and an agent is broken",
        stream_faults.cut_stream,
        needs_repair=False,
        why_not=stream_faults.why_no_descriptors,
    ),
    Disruption(
        "delay_stream",
        "nothing arrives over these connections for two seconds",
        stream_faults.delay_stream,
        needs_repair=False,
        why_not=stream_faults.why_no_descriptors,
    ),
    Disruption(
        "lose_head",
        "SIGKILL to all processes of the cluster's head, which comes back from its store",
        head_faults.lose_head,
        needs_head=True,
        per_episode=2,
    ),
    Disruption(
        "lose_head_and_worker",
        "the same, and SIGKILL to a worker while the head is away",
        head_faults.lose_head_and_worker,
        needs_head=True,
        per_episode=2,
    ),
    Disruption(
        "fence_controller",
        "the head is lost, and the job's process is paused until its successor has attached",
        head_faults.fence_controller,
        needs_head=True,
        per_episode=1,
        why_not=hostile.why_no_second_submission,
    ),
    Disruption(
        "stop_generators",
        "SIGSTOP to some or all workers of roles for seconds, which their job must bear",
        role_disruptions.stop_role_workers,
        needs_repair=False,
        only=("rollouts",),
    ),
    Disruption(
        "scale_roles",
        "fewer generators, then as many as before",
        role_disruptions.scale_role,
        needs_repair=False,
        only=("rollouts",),
    ),
    Disruption(
        "scale_ranks",
        "fewer ranks, then as many as before",
        role_disruptions.scale_ranks,
        needs_repair=False,
        only=("rollouts", "stream"),
    ),
    Disruption(
        "kill_controller",
        "SIGKILL to the job's process, which Ray starts again",
        role_disruptions.kill_controller,
        per_episode=1,
        only=("rollouts", "stream"),
    ),
)
DISRUPTIONS: Mapping[str, Disruption] = {kind.name: kind for kind in _KINDS}


class DisruptionRunner:
    """Inflicts disruptions at their steps, one at a time, in a thread of its own until `stop`."""

    def __init__(self, target: Target, texts: Sequence[str], seed: int) -> None:
        self.problems: list[str] = []
        self._target = target
        self._texts = texts
        self._rng = random.Random(seed)
        self._thread = threading.Thread(target=self._run, name="disruptions", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """To be called when the job has ended: every wait of an inflicting function ends then."""
        self._target.ended.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.problems.append(
                f"{self._target.text} did not return {timeout_s:g} s after the job"
            )

    def _run(self) -> None:
        for text in self._texts:
            name, step = parse_disruption(text) or ("", 0)
            self._target.text = text
            try:
                self._target.wait_for_step(step, timeout_s=float("inf"))
                DISRUPTIONS[name].inflict(self._target, self._rng)
                self._target.mark_fired()
            except JobEndedError:
                return  # what has not been recorded is reported as not fired
            except NotHeldError as error:
                self.problems.append(str(error))
            except Exception as error:  # noqa: BLE001  # a thread's exception must not be lost
                self.problems.append(f"{text} failed: {error!r}")
