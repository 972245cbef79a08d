"""Courses of a job in words, which `follow` runs against the fake cluster.

    aab max=3 replicas=0              the initial workers' nodes, and settings of the job
    train 3; kill 1; wait 0.5         what happens: `_ACTIONS`, and the methods of `_Course`
    members 0 2; says "was lost"      what must be so then: `_READINGS`, likewise

A job that has not ended after the last line must succeed with its next step.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rayzero.engine.errors import DataError, RayzeroError
from rayzero.orchestrator.control.elastic import (
    DRAIN_POLL_INTERVAL_S,
    HEAD_LIMIT_S,
    JOIN_BATCH_S,
)
from rayzero.orchestrator.errors import JobFailedError, JobStoppedError, WorkerLostError
from rayzero.orchestrator.job_events import (
    CheckpointFailed,
    FaultDetected,
    JobWarning,
    NodeChecked,
    Repaired,
    Resized,
    Resumed,
    WorkersReady,
)
from rayzero.orchestrator.machine import StopRequested
from rayzero.orchestrator.spec import CheckpointSpec, RecoverySpec, Workers
from rayzero.orchestrator.spec_sections import HealthSpec
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FaultFired
from rayzero.workers.messages import Finished, Joined, StepDivided
from tests.orchestrator.fake_cluster import FakeCheckpointStore, FakeCluster, FakeProcess
from tests.orchestrator.support import Harness, settle

_SECTIONS = {
    **dict.fromkeys(Workers.model_fields, "workers"),
    **dict.fromkeys(RecoverySpec.model_fields, "recovery"),
    **dict.fromkeys(CheckpointSpec.model_fields, "checkpoint"),
    **dict.fromkeys(HealthSpec.model_fields, "health"),
}


async def follow(folder: Path, course: str) -> None:
    setup, *commands = filter(None, map(str.strip, re.split("[;\n]", course)))
    followed = _Course(folder, setup)
    for command in commands:
        verb, *words = shlex.split(command)
        try:
            if verb in _READINGS:
                seen = [*map(str, _READINGS[verb](followed))]
                assert seen == words, seen
            elif verb in _ACTIONS:
                _ACTIONS[verb](followed, *words)
                await settle()
            else:
                await getattr(followed, verb)(*words)
        except BaseException as error:
            error.add_note(f"at {command!r}; states: {followed.job.states}")
            raise


def _settings(words: Iterable[str]) -> dict[str, Any]:
    """`key=value` each, the values in JSON."""
    return {key: json.loads(value) for key, value in (word.split("=", 1) for word in words)}


def _compare(expected: Iterable[str], seen: dict[str, Any]) -> None:
    """`expected`: `key=value` each, the values as `str` makes them."""
    pairs = dict(word.split("=", 1) for word in expected)
    found = {key: str(seen[key]) for key in pairs}
    assert found == pairs, found


class _Course:
    def __init__(self, folder: Path, setup: str) -> None:
        nodes, *words = setup.split()
        self.folder = folder
        settings = {"min": 2, **_settings(words)}
        stored = settings.pop("stored", [])
        auto, mirrors, engine = (settings.pop(it, True) for it in ("auto", "mirrors", "engine"))
        every = settings.get("every_steps", 0) if engine else 0
        cluster = FakeCluster(nodes, auto=auto, mirrors=mirrors, checkpoint_every=every)
        for process in cluster.processes.values():
            process.engine = engine
        sections: dict[str, Any] = defaultdict(dict)
        for key, value in settings.items():
            (sections[_SECTIONS[key]] if key in _SECTIONS else sections)[key] = value
        self.cluster, self.vaults = cluster, cluster.vaults
        self.store = FakeCheckpointStore(*stored)
        self.job = Harness(folder, cluster, self.store, **sections)
        self.log = self.job.log

    def processes(self, workers: Iterable[str]) -> list[FakeProcess]:
        return [self.cluster.processes[int(worker)] for worker in workers]

    def set_all(self, workers: Iterable[str], flag: str) -> None:
        for process in self.processes(workers):
            setattr(process, flag, True)

    async def train(self, steps: str) -> None:
        await self.job.steps(int(steps))

    async def wait(self, seconds: str) -> None:
        await self.job.clock.advance(float(seconds))

    async def turns(self, count: str) -> None:
        """Of the event loop."""
        for _ in range(int(count)):
            await asyncio.sleep(0)

    async def begin_kill(self, worker: str) -> None:
        self.cluster.kill(int(worker))

    async def join(self, node: str = "a") -> None:
        """A new worker is ready, and the time that others have to come with it passes."""
        await self.job.join(node, wait_s=JOIN_BATCH_S)

    async def functions_hold(self, step: str) -> None:
        """When they end: the state of that step instead of the last one; null: none."""
        for process in self.cluster.processes.values():
            process.memory_step = json.loads(step)
            process.holds_state = process.memory_step is not None

    async def folder_removed(self) -> None:
        """With its checkpoints."""
        self.store.steps.clear()
        self.job.controller.on_folder_removed()

    async def joined(self, *workers: str) -> None:
        """Workers join one by one, where not `auto`."""
        await settle()
        for worker in map(int, workers):
            assign = self.job.assignments[worker]
            await self.job.send(worker, Joined(assign.generation, assign.rank))

    async def crash(
        self, worker: str, kind: Any, error: str = "ValueError: hole", step: str = ""
    ) -> None:
        await self.job.crash(int(worker), kind, error, step=int(step) if step else None)

    async def returns(self, *workers: str) -> None:
        """Their functions do, without a further step."""
        for process in self.processes(workers):
            assign = process.assign or process.ahead
            assert assign is not None
            process.assign = None
            ended = Finished(assign.generation, assign.rank, {}, {}, 1)
            await self.job.send(process.info.index, ended)

    async def drain(self, node: str) -> None:
        self.cluster.draining = frozenset({node})
        await self.job.clock.advance(DRAIN_POLL_INTERVAL_S)

    async def head(self, where: str) -> None:
        """Whether the cluster's head is `away` or `back`."""
        answers = self.cluster.head_answers
        answers.clear() if where == "away" else answers.set()
        await self.job.clock.advance(HEAD_LIMIT_S + DRAIN_POLL_INTERVAL_S)

    async def last(self) -> None:
        """The last step, after which the functions return."""
        await settle()
        assert self.cluster.step(last=True)
        await settle()

    async def replaced(self, *expected: str) -> None:
        """Words: `worker`, `worker:delay` or `worker:delay:avoided node`."""
        seen = [
            (str(worker), f"{delay_s:g}", *avoid)
            for worker, delay_s, avoid in sorted(self.cluster.replaced)
        ]
        parts = [tuple(word.split(":")) for word in expected]
        assert [it[: len(part)] for it, part in zip(seen, parts, strict=True)] == parts, seen

    async def called_ahead(self, worker: str, *place: str) -> None:
        """`place`: `rank of size`, or nothing if it was not called."""
        ahead = self.cluster.processes[int(worker)].ahead
        assert ([] if ahead is None else [str(ahead.rank), "of", str(ahead.world_size)]) == [*place]

    async def commanded(self, name: str, *workers: str) -> None:
        of_name = sorted(worker for command, worker in self.cluster.commands if command == name)
        assert [*map(str, of_name)] == [*workers], of_name

    async def says(self, text: str) -> None:
        """A warning, or the text of a fault or a failed check."""
        told = *self.log.of(FaultDetected), *self.log.of(NodeChecked)
        texts = [self.job.warnings, *(event.text for event in told)]
        assert text in "\n".join(texts), texts

    async def says_times(self, count: str, text: str) -> None:
        assert sum(text in it.text for it in self.log.of(JobWarning)) == int(count)

    async def fault(self, *expected: str) -> None:
        """The last one."""
        _compare(expected, vars(self.log.of(FaultDetected)[-1]))

    async def recovery(self, *expected: str) -> None:
        """The only repair, or the only resize."""
        (it,) = self.log.of(Repaired) or self.log.of(Resized)
        seconds = {f"{phase}_s": value for phase, value in it.seconds.items()}
        made = {"kind": type(it).__name__, "total_s": it.total_s, "phases": " ".join(it.seconds)}
        _compare(expected, vars(it) | seconds | made)

    async def finish(self, *expected: str) -> None:
        """The last step; the job has succeeded."""
        await self.last()
        await self.succeeded(*expected)

    async def succeeded(self, *expected: str) -> None:
        metrics = (await self.job.result()).metrics
        sizes = "-".join(map(str, metrics["world_sizes"]))
        faults = ",".join(f"{cause}:{count}" for cause, count in metrics["faults"].items())
        _compare(expected, metrics | metrics["checkpoints"] | {"sizes": sizes, "faults": faults})

    async def fails(self, pattern: str) -> None:
        await self.job.fails(JobFailedError, f"(?s){pattern}")

    async def stopped(self, pattern: str | None = None) -> None:
        await self.job.fails(JobStoppedError, pattern)


_ACTIONS: dict[str, Callable[..., object]] = {
    "kill": lambda it, *workers: [it.cluster.kill(int(worker)) for worker in workers],
    "kill_unreported": lambda it, worker: it.cluster.kill(int(worker), reported=False),
    "report_cause": lambda it, worker, cause: it.cluster.report_cause(int(worker), cause),
    "come": lambda it, node="a": it.cluster.join(node),
    "fail_to_start": lambda it, why: it.cluster.joining.put_nowait(WorkerLostError(why)),
    "no_worker_starts": lambda it: it.cluster.may_start.clear(),
    "prepare": lambda it, worker: it.cluster.prepare(int(worker)),
    "divide": lambda it, parts: it.cluster.send(
        0, StepDivided(it.job.assignments[0].generation, 0, int(parts))
    ),
    "stuck": lambda it, *workers: it.set_all(workers, "stuck"),
    "unresponsive": lambda it, *workers: it.set_all(workers, "unresponsive"),
    "release": lambda it, *workers: [it.cluster.release_stuck(int(it_)) for it_ in workers],
    "beat": lambda it, worker, *to: it.cluster.send_heartbeat(int(worker), **_settings(to)),
    "leave": lambda it, worker: it.cluster._unwind(it.cluster.processes[int(worker)]),
    "leaving": lambda it, *workers: it.cluster.leaving.update(map(int, workers)),
    "linger": lambda it, *workers: setattr(
        it.vaults, "still_running", {process.info.pid for process in it.processes(workers)}
    ),
    "switch": lambda it, *to: vars(it.cluster).update(_settings(to)),
    "slow": lambda it, command, turns: it.cluster.delays.update({command: int(turns)}),
    "starts_took": lambda it, seconds: it.job.events.emit(WorkersReady((), float(seconds))),
    "lose_node": lambda it, node: it.cluster.lose_node(node),
    "kill_vault": lambda it, node: it.vaults.kill(node),
    "vault_is": lambda it, node, failure: setattr(it.vaults.by_node[node], "failure", failure),
    "measures": lambda it, nodes, *figures: it.vaults.figures.update(
        dict.fromkeys(nodes, _settings(figures))
    ),
    "no_vault_opens": lambda it: setattr(it.vaults, "may_open", False),
    "vaults_open": lambda it: setattr(it.vaults, "may_open", True),
    "writes_hang": lambda it: it.vaults.may_write.clear(),
    "writes_end": lambda it: it.vaults.may_write.set(),
    "store_fails": lambda it, times, why: it.store.errors.extend(
        RayzeroError(why) for _ in range(int(times))
    ),
    "writes_fail": lambda it, times: it.vaults.write_errors.extend(
        RayzeroError("the disk is full") for _ in range(int(times))
    ),
    "slot_is_missing": lambda it: it.vaults.write_errors.append(DataError("the slot is gone")),
    "not_injectable": lambda it, node, why: it.vaults.not_injectable.update({node: why}),
    "scale": lambda it, least, most: it.job.controller.scale(int(least), int(most)),
    "stop": lambda it: it.job.controller.post_event(StopRequested()),
}
_READINGS: dict[str, Callable[[_Course], Iterable[object]]] = {
    "members": lambda it: it.job.running or ["not running"],
    "assigned": lambda it: sorted(it.job.assignments),
    "training": lambda it: [process.info.index for process in it.cluster.members],
    "ranks": lambda it: [f"{worker}:{rank}" for worker, rank in sorted(it.job.ranks.items())],
    "size": lambda it: [len(it.job.assignments)],
    "runs": lambda it: ["ended"] * it.job.run.done(),
    "state": lambda it: it.job.states[-1:],
    "states": lambda it: it.job.states,
    "restored": lambda it: it.job.restored,
    "resumed": lambda it: [event.step for event in it.log.of(Resumed)],
    "loaded_from": lambda it: {
        assign.restore.checkpoint for assign in it.job.assignments.values() if assign.restore
    },
    "functions_stay": lambda it: {each.survivors_stay for each in it.job.assignments.values()},
    "retired": lambda it: [w for w, each in it.cluster.processes.items() if each.retired],
    "dead": lambda it: [w for w, each in it.cluster.processes.items() if not each.alive],
    "vaults_opened": lambda it: it.vaults.opened,
    "vaults_closed": lambda it: it.vaults.closed,
    "vault": lambda it: {assign.vault for assign in it.job.assignments.values()},
    "checked": lambda it: it.vaults.checked,
    "health": lambda it: [f"{e.node}:{bool(e.text)}" for e in it.log.of(NodeChecked)],
    "faults": lambda it: [fault.cause for fault in it.log.of(FaultDetected)],
    "node_faults": lambda it: [
        f"{node}:{fault.partition('(')[0]}" for node, fault in it.vaults.node_faults
    ],
    "fired": lambda it: [
        f"{fired.fault.partition('(')[0]}:{fired.rank}:{fired.step}"
        for fired in FaultRecord(it.folder / "job").read()
    ],
    "says_of_faults": lambda it: [len(it.log.of(FaultFired))],
    "stored": lambda it: it.store.steps,
    "retries": lambda it: [event.again_in_s for event in it.log.of(CheckpointFailed)],
    "pinned": lambda it: {
        slot.step
        for vault in it.vaults.by_node.values()
        for slot in vault.slots.values()
        if slot.pinned
    },
    "marked": lambda it: sorted(it.store.marked),
}
