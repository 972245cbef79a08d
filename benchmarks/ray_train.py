"""The same model and fault under Ray Train's TorchTrainer, set up as documented.

DistributedDataParallel, a checkpoint by rank 0 every few steps with `ray.train.report`, and a
FailureConfig that restarts the worker group.
"""

from __future__ import annotations

import json
import logging
import os
import random
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import ray
import torch
import torch.distributed as dist
from ray import train
from ray.train.torch import TorchTrainer, prepare_model
from torch.utils.data import DataLoader

from benchmarks.faults import MODEL, FaultCost, inject_fault, process_start_time
from examples.gpt.model import GPT, GPTConfig
from rayzero import ParquetTokens

CHECKPOINT_INTERVAL = 5
UNDISTURBED_STEPS = 10
TIMEOUT_S = 240.0
GLOBAL_BATCH = 4  # examples/gpt/engine.json; split over the ranks, rounded down


@dataclass(frozen=True)
class Plan:
    """Like `rayzero_job.Plan`. `folder` is for checkpoints and the workers' step records."""

    workers: int
    fault: str
    kills: int
    seed: int
    folder: str


@dataclass(frozen=True)
class StepEnd:
    """A rank finished a step. `attempt` identifies the run of the worker group."""

    attempt: str
    rank: int
    step: int
    at_s: float
    pid: int


Attempts: TypeAlias = dict[str, dict[int, list[StepEnd]]]
"""Run of the worker group -> step -> its ends on all ranks."""


def train_loop(config: dict[str, Any]) -> None:
    """Train from the latest checkpoint until the file `stop` exists."""
    folder = Path(config["folder"])
    os.chdir(config["cwd"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    context = train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    model = prepare_model(GPT(GPTConfig(**MODEL)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    step = _resume(model, optimizer)
    data: Any = ParquetTokens("data/stdlib/train", MODEL["context"])
    batches = iter(DataLoader(data, batch_size=max(1, GLOBAL_BATCH // world), shuffle=True))
    stop = torch.zeros(1)
    attempt = _broadcast(str(os.getpid()))
    while not stop.item():
        step += 1
        batch = next(batches)
        optimizer.zero_grad()
        model(batch[:, :-1], batch[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        line = json.dumps([attempt, rank, step, time.time(), os.getpid()]) + "\n"
        with (folder / f"{attempt}-{rank}.steps").open("a") as file:
            file.write(line)
        if step % CHECKPOINT_INTERVAL == 0:
            _report(model, optimizer, step, rank)
        stop.fill_(float((folder / "stop").exists()))
        dist.all_reduce(stop)


def _broadcast(value: str) -> str:
    """Return the value of rank 0 on all ranks."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def _resume(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(f"{folder}/state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _report(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    if rank != 0:
        train.report({"step": step})
        return
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, f"{folder}/state.pt")
        train.report({"step": step}, checkpoint=train.Checkpoint.from_directory(folder))


def run(plan: Plan, log: Callable[[str], None]) -> list[FaultCost]:
    """Run the trainer on a local cluster, inject all faults, and stop it.

    Raises:
        TimeoutError: an expected step did not occur within TIMEOUT_S.
    """
    ray.init(
        address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    injector = _FaultInjector(plan, log)
    thread = threading.Thread(target=injector.run, name="fault-injector", daemon=True)
    try:
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={"folder": plan.folder, "cwd": os.getcwd()},
            scaling_config=train.ScalingConfig(
                num_workers=plan.workers, resources_per_worker={"CPU": 0.5}
            ),
            run_config=train.RunConfig(
                storage_path=plan.folder,
                name="ray-train",
                failure_config=train.FailureConfig(max_failures=plan.kills + 3),
                checkpoint_config=train.CheckpointConfig(num_to_keep=2),
            ),
        )
        thread.start()
        trainer.fit()
        thread.join(10)
    finally:
        (Path(plan.folder) / "stop").touch()
        ray.shutdown()
    if injector.error is not None:
        raise injector.error
    return injector.costs


class _FaultInjector:
    """Injects faults from a thread while `fit` runs, then ends the training."""

    def __init__(self, plan: Plan, log: Callable[[str], None]) -> None:
        self.costs: list[FaultCost] = []
        self.error: Exception | None = None
        self._plan = plan
        self._log = log
        self._rng = random.Random(plan.seed)

    def run(self) -> None:
        try:
            for number in range(1, self._plan.kills + 1):
                self._wait(lambda attempts: len(latest_attempt(attempts)[1]) > UNDISTURBED_STEPS)
                cost = self._inject()
                self.costs.append(cost)
                self._log(f"kill {number} of {self._plan.kills}: {cost.total_s:.1f} s")
        except TimeoutError as error:
            self.error = error
        finally:
            (Path(self._plan.folder) / "stop").touch()

    def _inject(self) -> FaultCost:
        before = self._read_steps()
        attempt, steps = latest_attempt(before)
        median_step_s = _median_step_s(steps)
        pids = {end.rank: end.pid for end in steps[max(steps)]}
        start_times = {pid: process_start_time(pid) for pid in pids.values()}
        rank = self._rng.choice(sorted(pids))
        fault_at_s = inject_fault(pids[rank], self._plan.fault, median_step_s, self._rng)

        def has_progressed(attempts: Attempts) -> bool:
            """Whether a new attempt has passed the last step of the old one."""
            latest_step = max(latest_attempt(attempts)[1])
            return latest_step > max(attempts[attempt]) and set(attempts) > set(before)

        after = self._wait(has_progressed)
        finished = max(after[attempt])
        new = [after[name] for name in after if name not in before]
        next_at_s = min(_end_s(steps[finished + 1]) for steps in new if finished + 1 in steps)
        others = [pid for other, pid in pids.items() if other != rank]
        return FaultCost(
            rank=rank,
            step=finished,
            wall_s=next_at_s - fault_at_s,
            step_s=median_step_s,
            median_step_s=median_step_s,
            steps_redone=finished + 1 - min(min(steps) for steps in new),
            restarted=sum(process_start_time(pid) != start_times[pid] for pid in others),
        )

    def _wait(self, condition: Callable[[Attempts], bool]) -> Attempts:
        """Wait until the recorded steps satisfy `condition`, and return them.

        Raises:
            TimeoutError: TIMEOUT_S have passed.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            attempts = self._read_steps()
            if attempts and condition(attempts):
                return attempts
            time.sleep(0.2)
        raise TimeoutError(f"Ray Train made no progress within {TIMEOUT_S:g} s")

    def _read_steps(self) -> Attempts:
        """Steps that all ranks finished, by attempt, oldest attempt first."""
        recorded: defaultdict[str, dict[int, list[StepEnd]]] = defaultdict(dict)
        for path in Path(self._plan.folder).glob("*.steps"):
            for line in path.read_text().split("\n")[:-1]:  # the last line may be incomplete
                end = StepEnd(*json.loads(line))
                recorded[end.attempt].setdefault(end.step, []).append(end)
        complete = {
            attempt: {step: ends for step, ends in steps.items() if len(ends) == self._plan.workers}
            for attempt, steps in recorded.items()
        }
        started = sorted(
            (_end_s(steps[min(steps)]), attempt) for attempt, steps in complete.items() if steps
        )
        return {attempt: complete[attempt] for _, attempt in started}


def latest_attempt(attempts: Attempts) -> tuple[str, dict[int, list[StepEnd]]]:
    return next(reversed(attempts.items()))


def _end_s(ends: list[StepEnd]) -> float:
    return max(end.at_s for end in ends)


def _median_step_s(steps: dict[int, list[StepEnd]]) -> float:
    """Median step time; excludes the effect of checkpoints."""
    ends = [_end_s(steps[step]) for step in sorted(steps)]
    return median(b - a for a, b in pairwise(ends))
