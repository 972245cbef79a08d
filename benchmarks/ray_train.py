"""The same model and the same fault under Ray Train's TorchTrainer, as its documentation has it.

DistributedDataParallel, a checkpoint of rank 0 every few steps through `ray.train.report`, and a
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

from benchmarks.strikes import MODEL, Strike, born, strike
from examples.gpt.model import GPT, GPTConfig
from rayzero import ParquetTokens

CHECKPOINT_EVERY = 5
QUIET_STEPS = 10
WAIT_S = 240.0
GLOBAL_BATCH = 4  # examples/gpt/engine.json; divided as far as it goes


@dataclass(frozen=True)
class Plan:
    """As `struck_job.Plan`. `folder`: for checkpoints, and for what the workers say."""

    workers: int
    fault: str
    kills: int
    seed: int
    folder: str


@dataclass(frozen=True)
class Ended:
    """A rank ended a step. `turn` tells the rounds of the worker group apart."""

    turn: str
    rank: int
    step: int
    at_s: float
    pid: int


Turns: TypeAlias = dict[str, dict[int, list[Ended]]]
"""Round of the worker group -> step -> its ends on all ranks."""


def train_loop(config: dict[str, Any]) -> None:
    """One worker, from the newest checkpoint until the file `stop` is there."""
    folder = Path(config["folder"])
    os.chdir(config["cwd"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    context = train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    model = prepare_model(GPT(GPTConfig(**MODEL)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    done = _resume(model, optimizer)
    data: Any = ParquetTokens("data/stdlib/train", MODEL["context"])
    batches = iter(DataLoader(data, batch_size=max(1, GLOBAL_BATCH // world), shuffle=True))
    stop = torch.zeros(1)
    turn = _shared(str(os.getpid()))
    while not stop.item():
        done += 1
        batch = next(batches)
        optimizer.zero_grad()
        model(batch[:, :-1], batch[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        line = json.dumps([turn, rank, done, time.time(), os.getpid()]) + "\n"
        with (folder / f"{turn}-{rank}.steps").open("a") as file:
            file.write(line)
        if done % CHECKPOINT_EVERY == 0:
            _report(model, optimizer, done, rank)
        stop.fill_(float((folder / "stop").exists()))
        dist.all_reduce(stop)


def _shared(value: str) -> str:
    """Rank 0's value, on all ranks."""
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


def strikes(plan: Plan, tell: Callable[[str], None]) -> list[Strike]:
    """Runs the trainer on a cluster of our own, strikes it, and ends it.

    Raises:
        TimeoutError: something did not come within WAIT_S.
    """
    ray.init(
        address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    striker = _Striker(plan, tell)
    thread = threading.Thread(target=striker.run, name="striker", daemon=True)
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
    if striker.error is not None:
        raise striker.error
    return striker.done


class _Striker:
    """Strikes from a thread beside `fit`, and ends the training when it has done so."""

    def __init__(self, plan: Plan, tell: Callable[[str], None]) -> None:
        self.done: list[Strike] = []
        self.error: Exception | None = None
        self._plan = plan
        self._tell = tell
        self._draw = random.Random(plan.seed)

    def run(self) -> None:
        try:
            for number in range(1, self._plan.kills + 1):
                self._wait(lambda turns: len(newest(turns)[1]) > QUIET_STEPS)
                self.done.append(self._strike())
                self._tell(f"kill {number} of {self._plan.kills}: {self.done[-1].total_s:.1f} s")
        except TimeoutError as error:
            self.error = error
        finally:
            (Path(self._plan.folder) / "stop").touch()

    def _strike(self) -> Strike:
        before = self._steps()
        turn, steps = newest(before)
        usual_s = _usual_s(steps)
        pids = {one.rank: one.pid for one in steps[max(steps)]}
        births = {pid: born(pid) for pid in pids.values()}
        rank = self._draw.choice(sorted(pids))
        struck_s = strike(pids[rank], self._plan.fault, usual_s, self._draw)

        def beyond(found: Turns) -> bool:
            """A new round has a step that the old one did not come to."""
            return max(newest(found)[1]) > max(found[turn]) and set(found) > set(before)

        after = self._wait(beyond)
        finished = max(after[turn])
        new = [after[name] for name in after if name not in before]
        next_s = min(_end_s(one[finished + 1]) for one in new if finished + 1 in one)
        return Strike(
            rank=rank,
            step=finished,
            wall_s=next_s - struck_s,
            step_s=usual_s,
            usual_s=usual_s,
            steps_redone=finished + 1 - min(min(one) for one in new),
            restarted=sum(born(pid) != births[pid] for one, pid in pids.items() if one != rank),
        )

    def _wait(self, so: Callable[[Turns], bool]) -> Turns:
        """What the workers say, once `so` holds for it.

        Raises:
            TimeoutError: WAIT_S are over.
        """
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s:
            found = self._steps()
            if found and so(found):
                return found
            time.sleep(0.2)
        raise TimeoutError(f"Ray Train did not go on within {WAIT_S:g} s")

    def _steps(self) -> Turns:
        """The steps that all ranks ended, of each round that has some, the oldest round first."""
        found: defaultdict[str, dict[int, list[Ended]]] = defaultdict(dict)
        for path in Path(self._plan.folder).glob("*.steps"):
            for line in path.read_text().split("\n")[:-1]:  # the last may be half written
                one = Ended(*json.loads(line))
                found[one.turn].setdefault(one.step, []).append(one)
        whole = {
            turn: {step: ends for step, ends in steps.items() if len(ends) == self._plan.workers}
            for turn, steps in found.items()
        }
        begun = sorted((_end_s(steps[min(steps)]), turn) for turn, steps in whole.items() if steps)
        return {turn: whole[turn] for _, turn in begun}


def newest(turns: Turns) -> tuple[str, dict[int, list[Ended]]]:
    return next(reversed(turns.items()))


def _end_s(ends: list[Ended]) -> float:
    return max(one.at_s for one in ends)


def _usual_s(steps: dict[int, list[Ended]]) -> float:
    """The median time of a step, which leaves those with a checkpoint out."""
    ends = [_end_s(steps[step]) for step in sorted(steps)]
    return median(b - a for a, b in pairwise(ends))
