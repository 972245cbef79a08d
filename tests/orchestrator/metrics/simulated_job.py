"""A simulated job whose events give a value to every metric."""

from __future__ import annotations

from typing import Any

from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job_events import (
    Checkpointed,
    CheckpointFailed,
    FaultDetected,
    FaultRecorded,
    GenerationStarted,
    JobEvent,
    Repaired,
    Resized,
    Rewound,
    RoleFault,
    RoleWorkerReady,
    RolloutsCounted,
    StateEntered,
    StepReplicated,
)
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.job_metrics import JobMetrics, Timestamps
from rayzero.orchestrator.policies.failure import Fault, FaultCause
from rayzero.orchestrator.progress import JobProgress, StepRecord
from rayzero.orchestrator.spec import CheckpointSpec, JobSpec, RecoverySpec, RoleSpec, Workers
from rayzero.workers.messages import Heartbeat, RoleReport, StepReport, WorkerInfo
from rayzero.workers.rollouts.counts import RolloutCounts
from rayzero.workers.spread import Spread
from rayzero.workers.step_rows import combine, combine_beats

SPEC = JobSpec(
    name="gpt",
    entrypoint="m:f",
    steps=100,
    workers=Workers(min=1, max=4),
    recovery=RecoverySpec(patience_s=30.0, max_faults=20, fault_window_s=3600.0),
    checkpoint=CheckpointSpec(every_steps=2),
)
UNIX = 1_700_000_000.0
WORKER = WorkerInfo(1, "a", "host-a", "10.0.0.1", 77)
GAUGES = {
    "loss": 2.5,
    "lr": 0.1,
    "grad_norm": 1.25,
    "loss_scale": 1024.0,
    "bad_samples": 2.0,
    "mfu": 0.4,
    "step_s": 0.5,
    "exposed_comm_s": 0.125,
    "step_samples": 8.0,
    "step_tokens": 256.0,
    "skipped": 1.0,
    "phases/data": 0.125,
    "phases/forward": 0.25,
    "phases/mirror": 0.0625,
    "phases/other": 0.0625,
    "checkpoint_s": 0.03125,
    "bytes/model_weights": 4096.0,
    "bytes/slots": 512.0,
    "resident_bytes": 2.0**20,
    "device_peak_bytes": 2.0**21,
    "cpu_cores": 1.5,
    "gpu_utilization": 0.75,
    "replica_bytes": 2048.0,
    "accuracy": 0.75,
}


class SimulatedJob:
    """Emits the events of a job to its metrics, on a clock that the test sets."""

    def __init__(self, **changes: Any) -> None:
        self.now_s = 100.0
        self.progress = JobProgress()
        self.events = EventBus(unix=lambda: self.now.unix_s)
        spec = SPEC.model_copy(update=changes)
        self.metrics = JobMetrics(spec, 2, lambda: self.now, self.events.facts)

    @property
    def now(self) -> Timestamps:
        return Timestamps(self.now_s, UNIX + self.now_s)

    def emit(self, event: JobEvent) -> None:
        self.events.emit(event)
        self.metrics.on_event(event, self.events.facts)

    def enter(self, state: State, generation: int = 1, world_size: int = 2) -> None:
        self.emit(StateEntered(state, generation, world_size, self.progress.steps))

    def form(self, generation: int, world_size: int, step: int) -> None:
        self.emit(Rewound(step, self.progress.rewind(step)))
        self.emit(GenerationStarted(tuple(f"host-{'abcd'[rank]}" for rank in range(world_size))))
        self.progress.start_generation(generation, world_size, step)
        self.enter(State.RUNNING, generation, world_size)

    def step(self, step: int, generation: int, world_size: int, **gauges: float) -> StepRecord:
        record = None
        for rank in range(world_size):
            traffic = {
                "collectives/all_gather/calls": 3.0 * step,
                "collectives/all_gather/bytes": 100.0 * step,
            }
            reported = {**GAUGES, "replica_step": float(step), **traffic, **gauges}
            streams = {"web/samples": 3.0, "s3://b/code/samples": 1.0, "web/blocks": 1.0}
            streams |= {"web/bytes": 512.0, "web/hits": 3.0, "s3://b/code/waits": 1.0}
            counters = {f"streams/{name}": number for name, number in streams.items()}
            report = StepReport(generation, rank, step, counters, reported, UNIX + self.now_s)
            rows = combine([rank], [report])
            self.metrics.ranks.on_rows(rows)
            beat = Heartbeat(rank, step + 1, "forward", 0.25)
            self.metrics.ranks.on_heartbeats(combine_beats([rank], [beat]))
            record = self.progress.add_rows(rows)
        assert record is not None
        self.emit(record)
        return record


def eventful_job() -> SimulatedJob:
    """A role with a fault; two steps, a fault, a repair, a resize, a checkpoint, a failed one."""
    roles = {"rollout": RoleSpec(entrypoint="m:generate", workers=Workers(min=1, max=4))}
    job = SimulatedJob(roles=roles)
    for number in (0, 1):
        job.emit(RoleWorkerReady("rollout", number, WORKER, number + 1))
    job.emit(RoleFault("rollout", 1, "lost", WORKER, "killed", 1))
    for number, version in ((0, 3), (1, 2)):
        reward = {"reward": Spread(4, 2.0 * number, 0.0, 1.0)}
        job.metrics.roles.on_report(RoleReport("rollout", number, reward, 128.0, version, 0.25))
    counts = RolloutCounts((5,), (2,), 3, 8, 2, 4096, 2**30, 1, 0.5, 1, (1,), (7.5,))
    job.metrics.roles.on_counts(RolloutsCounted(counts, ("rollout",)))
    job.enter(State.STARTING, 0, 0)
    job.now_s += 5
    job.form(1, 2, 0)
    for step in (1, 2):
        job.now_s += 1
        job.step(step, 1, 2)
    job.emit(StepReplicated(2, 4096))
    job.now_s += 1
    job.emit(FaultRecorded(Fault(FaultCause.PROCESS_LOST, WORKER, 1, 3, "killed", job.now_s, 1)))
    job.emit(FaultDetected("lost", WORKER, 1, 3, "rank 1 was lost"))
    job.enter(State.RECOVERING, 1, 2)
    job.form(2, 1, 1)
    job.now_s += 2
    job.step(2, 2, 1)
    job.emit(Repaired("lost", ("rank 1",), 1, 1, 2, 1, {"detect": 0.5, "load": 1.0}))
    job.emit(Checkpointed(2, "runs/gpt/step-2", 3000, 0.75, 0.01))
    job.emit(CheckpointFailed(3, "no room", 1, None))
    job.enter(State.RESIZING, 2, 1)
    job.form(3, 1, 2)
    job.now_s += 2
    job.step(3, 3, 1, loss=float("nan"))
    job.emit(Resized("from 1 to 1 workers", 2, 1, 1, {"drain": 0.5}))
    return job
