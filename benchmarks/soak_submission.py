"""A submission of a soak test's job: the first one, and one that takes the job over from it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import soak_job, soak_rollouts, soak_streams
from benchmarks.clusters import connect_to_cluster
from benchmarks.disruptions import DISRUPTIONS
from benchmarks.soak_control import SoakControl, parse_disruption
from benchmarks.soak_plan import STREAM_WORKERS, WORLD_SIZE, Plan, fault_kind, kind_of
from rayzero.engine.data.sample_ledger import Order
from rayzero.engine.data.streams.readers import IterableStream
from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job.handle import JobHandle
from rayzero.orchestrator.job_events import (
    JobEvent,
    JobWarning,
    Reattached,
    Repaired,
    Resized,
    RoleFault,
    RoleWorkerReady,
    RolloutsCounted,
    RunAdopted,
)
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.spec import Rollouts, Workers
from rayzero.workers.chaos.spec import FaultFired

JOB_NAME = "soak"
STREAM_FOLDER = "stream"
"""Beside the job's, of which faults damage files."""
FAULT_TIMEOUT_S, LEAST_TIMEOUT_S = 120.0, 600.0
"""For a whole episode: for each fault, at least. A busy machine needs half of it."""
STOP_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 1.0
CHECKPOINT_INTERVAL = 5
PATIENCE_S = 10.0
"""Of a rank that does not leave its generation, a disk and a store. Hangs are found by limits that
are learned, as by default."""
LEASE_S = 3.0
START_TIMEOUT_S = 120.0
"""Also for a new process's first step, in which a fault may hang it."""
CPUS = {1: max(STREAM_WORKERS) + 1, 2: WORLD_SIZE - 1}
"""CPUs per node, by number of nodes. With two nodes, one cannot hold all workers."""
NON_DISRUPTIVE = ("slow", "tear_file", "full_disk", "slow_store")
"""Faults of the language that require no repair."""
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True)
class Recovery:
    """A repair, or the refill of a vault: its cause and cost.

    Args:
        steps_redone: finished steps that were done again; `copied_redone`: those of them that all
            ranks had copied, and whose copies were not lost with a vault and one of the ranks.
    """

    kind: str
    seconds: float
    steps_redone: int
    copied_redone: int = 0


def timeout_s(episode: Plan) -> float:
    return max(LEAST_TIMEOUT_S, FAULT_TIMEOUT_S * len(episode.faults))


def make_job(episode: Plan, folder: Path) -> Job:
    """The job of an episode. Two calls return the same job."""
    of_rollouts: dict[str, Any] = {}
    if episode.rollouts:
        rollouts = Rollouts(group=soak_job.GROUP)
        of_rollouts = {"rollouts": rollouts, "roles": soak_rollouts.make_roles()}
    stream: dict[str, Any] = {}
    loader = {"num_workers": episode.loader_processes}
    if episode.stream:
        place = str(folder / STREAM_FOLDER)
        stream = {"kind": episode.stream, "folder": place, "has_bad": episode.has_bad}
        loader["max_bad_samples"] = count_bad_samples(episode, folder)
    return Job(
        name=JOB_NAME,
        entrypoint="benchmarks.soak_entry:train",
        engine=soak_job.engine_config(episode.stage, episode.micro_batch, loader),
        workers=Workers(min=1, max=episode.workers, start_timeout_s=START_TIMEOUT_S),
        args={
            "world_size": episode.workers,
            "faults": list(episode.faults),
            "rollouts": episode.rollouts,
            "stream": stream,
        },
        steps=episode.steps,
        seed=episode.seed,
        checkpoint={
            "path": str(folder),
            "every_steps": CHECKPOINT_INTERVAL,
            "lease_s": LEASE_S,
        },
        recovery={"patience_s": PATIENCE_S, "max_faults": 1000, "fault_window_s": 1.0},
        faults=[text for text in episode.faults if parse_disruption(text) is None],
        ledger=True,
        **of_rollouts,
    )


def find_order(episode: Plan, folder: Path) -> Order:
    """The order of the samples of a job on a stream."""
    stream = soak_streams.open_stream(episode.stream, folder / STREAM_FOLDER, has_bad=False)
    if isinstance(stream, IterableStream):
        return stream.order(soak_job.SAMPLES)
    return stream.order(episode.seed, soak_job.SAMPLES)


def count_bad_samples(episode: Plan, folder: Path) -> int:
    """The bad samples of all steps together: the job is allowed none more."""
    if not episode.has_bad:
        return 0
    batches = soak_job.batches_in_order(episode.steps, find_order(episode, folder))
    return sum(soak_streams.is_bad(number) for batch in batches for number in batch)


def run_job(
    episode: Plan,
    folder: Path,
    log: EventLogger,
    replace_lost_nodes: Callable[[], None],
    deadline_s: float,
    is_taken_over: Callable[[], bool] = lambda: False,
    on_submitted: Callable[[JobHandle], None] = lambda handle: None,
) -> str:
    """Submit the job and wait for its end, or until another submission has taken it over. Returns
    the error; empty if it succeeded.

    Args:
        deadline_s: by the monotonic clock.
    """
    handle = make_job(episode, folder).submit(observer=log)
    on_submitted(handle)
    try:
        while time.monotonic() < deadline_s:
            if handle.wait(POLL_INTERVAL_S):
                break
            if is_taken_over():
                return ""
            replace_lost_nodes()
        if not handle.wait(0.0):
            return f"the job did not end within {timeout_s(episode):g} s"
        handle.result()
    except RayzeroError as error:
        return f"the job failed: {error}"
    finally:
        if is_taken_over():
            handle.close()  # its controller ends by itself
        else:
            handle.end()
    return ""


class EventLogger:
    """An observer that attributes each recovery to its fault and logs all events to a file."""

    def __init__(self, output_dir: Path, control: SoakControl) -> None:
        self.recoveries: list[Recovery] = []
        self.resizes = 0
        self._output_dir = output_dir
        self._control = control
        self._attributed: list[FaultFired] = []
        self._start_s = time.monotonic()
        self._steps = 0
        self._copied_step = 0  # the newest that all ranks have mirrored
        self._copied_before = 0  # in earlier generations
        self._generation = 0
        self._lost_vault = False  # since the last repair
        self._adopted: tuple[RunAdopted, float] | None = None
        self._role_faults: dict[tuple[str, int], tuple[str, float]] = {}

    def on_event(self, event: JobEvent) -> None:
        if isinstance(event, StepRecord):
            self._on_step(event)
        if isinstance(event, StepRecord | RolloutsCounted):
            return
        with (self._control.folder / "events.txt").open("a") as file:
            elapsed_s = time.monotonic() - self._start_s
            file.write(f"{elapsed_s:7.2f} s, {self._steps:3} steps: {event}\n")
        now_s = time.monotonic()
        if isinstance(event, JobWarning):
            self._lost_vault |= event.text.startswith("the vault on node")
        elif isinstance(event, Repaired):
            self._on_repaired(event)
        elif isinstance(event, Resized) and "vault" in event.reason:
            self.recoveries.append(Recovery("kill_vault", _seconds(event), 0))
        elif isinstance(event, Resized):
            self.resizes += 1
        elif isinstance(event, RunAdopted):
            self._adopted = event, now_s
        elif isinstance(event, Reattached):
            self.recoveries.append(Recovery(self._cause("reattached"), event.offline_s, 0))
        elif isinstance(event, RoleFault):
            self._role_faults[event.role, event.number] = event.cause, now_s
        elif isinstance(event, RoleWorkerReady):
            cause, lost_s = self._role_faults.pop((event.role, event.number), ("", 0.0))
            if cause:
                self.recoveries.append(Recovery(f"({event.role} {cause})", now_s - lost_s, 0))

    def ignore_fired(self) -> None:
        """Attributes nothing to the faults that have fired so far."""
        self._attributed = soak_job.read_fired(str(self._output_dir), self._control)

    def _on_repaired(self, event: Repaired) -> None:
        kind = "kill_vault" if event.cause == "rollouts" else self._cause(event.cause)
        has_copies = not (self._lost_vault and event.lost)
        redone = max(0, self._copied_before - event.step) if has_copies else 0
        self.recoveries.append(Recovery(kind, _seconds(event), event.steps_redone, redone))
        self._lost_vault = False

    def _on_step(self, record: StepRecord) -> None:
        self._steps = record.step
        if record.generation != self._generation:
            self._generation = record.generation
            self._copied_before = self._copied_step
        self._copied_step = record.mirrored_step or self._copied_step
        if self._adopted is not None:
            (adopted, at_s), self._adopted = self._adopted, None
            seconds = adopted.offline_s + time.monotonic() - at_s
            redone = max(0, self._finished_before(record.generation) - record.step + 1)
            self.recoveries.append(Recovery(self._cause("adopted"), seconds, redone))

    def _finished_before(self, generation: int) -> int:
        """The newest step that all ranks of an earlier generation have in the ledger: nobody was
        told of those that were finished without a controller."""
        newest: defaultdict[str, list[int]] = defaultdict(list)
        for path in self._output_dir.glob("ledger/*/generation-*-rank-*.jsonl"):
            name, _, _ = path.name.partition("-rank-")
            lines = path.read_text().splitlines()
            newest[name].append(max((json.loads(line)["step"] for line in lines), default=0))
        before = (it for name, it in newest.items() if int(name.split("-")[1]) < generation)
        return max(map(min, before), default=0)

    def _cause(self, reported: str) -> str:
        """Kind of the first fault since the last repair; the reported cause if there is none."""
        fired = soak_job.read_fired(str(self._output_dir), self._control)
        new = [kind_of(event.fault) for event in fired if event not in self._attributed]
        self._attributed += fired
        return next((kind for kind in new if _disrupts(kind)), f"({reported})")


def _seconds(recovery: Repaired | Resized) -> float:
    """Duration, excluding the current step, which a resize allows to finish."""
    return recovery.total_s - recovery.seconds.get("drain", 0.0)


def _disrupts(kind: str) -> bool:
    if kind in DISRUPTIONS:
        return DISRUPTIONS[kind].needs_repair
    return kind not in NON_DISRUPTIVE and fault_kind(kind).target not in ("vault", "role")


class Successor:
    """A second submission of the job, which takes it over from a controller that is paused.

    Its process has a cluster of its own, and sees another boot id: for the lease of the job's
    folder it is another machine, which cannot know whether the first controller lives.
    """

    def __init__(self, episode: Plan, folder: Path, nodes: int) -> None:
        self._episode = episode
        self._folder = folder
        self._nodes = nodes
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> int:
        """Returns its process. Called by the runner's thread, at most once."""
        arguments = {"episode": asdict(self._episode), "nodes": self._nodes}
        request = self._folder / "successor.json"
        request.write_text(json.dumps(arguments))
        boot_id = self._folder / "boot_id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        script = f'mount --bind "{boot_id}" {_BOOT_ID} && exec "$@"'
        command = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", script, "sh"]
        command += [sys.executable, "-m", "benchmarks.soak_submission", str(request)]
        with (self._folder / "successor.log").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        self._process = process
        return process.pid

    def is_started(self) -> bool:
        return self._process is not None

    def wait(self, deadline_s: float) -> tuple[str, list[Recovery]]:
        """Its error, empty if it succeeded, and its recoveries."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline_s - time.monotonic()) + STOP_TIMEOUT_S)
        result = self._folder / "successor-result.json"
        if not result.exists():
            return f"the second submission did not end: {self._folder}/successor.log", []
        values = json.loads(result.read_text())
        return values["error"], [Recovery(**entry) for entry in values["recoveries"]]

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()


def main(arguments: list[str]) -> int:
    """Runs a second submission, as `Successor.start` describes it."""
    path = Path(arguments[0])
    request = json.loads(path.read_text())
    values, nodes = request["episode"], request["nodes"]
    episode = Plan(**(values | {"faults": tuple(values["faults"])}))
    log = EventLogger(path.parent / JOB_NAME, SoakControl.from_environment())
    log.ignore_fired()
    deadline_s = time.monotonic() + timeout_s(episode)
    with connect_to_cluster(nodes, CPUS[nodes]) as cluster:
        error = run_job(episode, path.parent, log, cluster.replace_lost_nodes, deadline_s)
    result = {"error": error, "recoveries": [asdict(entry) for entry in log.recoveries]}
    (path.parent / "successor-result.json").write_text(json.dumps(result))
    return int(bool(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
