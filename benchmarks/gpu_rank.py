"""What one rank of `gpu` does: builds one system, alone in its processes, and times its steps."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
import warnings
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.kernels import profile_exposed
from benchmarks.systems import ALL, Step
from examples.gpt.model import GPT, GPTConfig

BATCHES = 4  # so few that the loss falls, and a system that updates wrongly shows
PROFILED = 3  # steps
TIMEOUT = timedelta(minutes=2)


@dataclass(frozen=True)
class Plan:
    """What is measured of every system.

    Attributes:
        mixed: bf16 with fp32 main weights; fp32 otherwise.
    """

    model: GPTConfig
    batch: int
    ranks: int
    steps: int
    warmup: int
    cuda: bool
    mixed: bool = True


@dataclass(frozen=True)
class Found:
    """What one rank found of one system.

    Attributes:
        seconds: of each timed step: the GPU's time from one step's begin to the next one's; on a
            CPU the process's.
        loss: of the last step, on this rank.
        peak_bytes: the most memory that the steps allocated on the GPU at once; None on a CPU.
        reserved_bytes: what the allocator then held; None on a CPU.
        communication_s: of a step, exposed: nothing was computed meanwhile; None on a CPU.
        copies_s: likewise, between host memory and the GPU.
        error: why there is nothing; empty if there is.
    """

    seconds: list[float]
    loss: float = float("nan")
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    communication_s: float | None = None
    copies_s: float | None = None
    error: str = ""


def rank_main(rank: int, name: str, plan: Plan, folder: str) -> None:
    """One rank; leaves what it found in `folder`, also when the system fails."""
    # what a launcher sets, for those that insist on one
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(plan.ranks))
    if plan.cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.simplefilter("ignore", FutureWarning)  # how peers call torch is theirs to mend
    backend = "cpu:gloo,cuda:nccl" if plan.cuda else "gloo"
    store = dist.FileStore(f"{folder}/store", plan.ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=plan.ranks, timeout=TIMEOUT)
    try:
        found = _measure(rank, name, plan)
    except Exception as error:  # noqa: BLE001 one system's failure is a line of the table
        traceback.print_exc()
        found = Found([], error=f"{type(error).__name__}: {error}".strip().splitlines()[0])
    Path(folder, f"rank{rank}.json").write_text(json.dumps(asdict(found)))
    if found.error:
        sys.exit(1)  # the others, which wait for this rank, are ended
    dist.barrier()
    dist.destroy_process_group()


def _measure(rank: int, name: str, plan: Plan) -> Found:
    device = torch.device("cuda", torch.cuda.current_device()) if plan.cuda else None
    torch.manual_seed(0)
    with device or torch.device("cpu"):
        model = GPT(plan.model)
    step = ALL[name](model, mixed=plan.mixed)
    del model
    batches = [_batch(rank, number, plan, device) for number in range(BATCHES)]
    run = _Steps(step, batches)
    for _ in range(plan.warmup):
        run()
    gc.collect()
    if not plan.cuda:
        seconds = _on_host(run, plan.steps)
        return Found(seconds, float(run.loss))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = _on_gpu(run, plan.steps)
    loss, peak = float(run.loss), torch.cuda.max_memory_allocated()
    reserved = torch.cuda.memory_reserved()
    exposed = profile_exposed(run, PROFILED)
    return Found(seconds, loss, peak, reserved, exposed.communication_s, exposed.copies_s)


class _Steps:
    """A system's steps, one after another. `loss` is the last one's."""

    def __init__(self, step: Step, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.loss = torch.tensor(float("nan"))
        self._step = step
        self._batches = batches
        self._number = 0

    def __call__(self) -> None:
        self.loss = self._step(*self._batches[self._number % len(self._batches)])
        self._number += 1


def _on_host(run: _Steps, steps: int) -> list[float]:
    seconds = []
    for _ in range(steps):
        begin = perf_counter()
        run()
        seconds.append(perf_counter() - begin)
    return seconds


def _on_gpu(run: _Steps, steps: int) -> list[float]:
    """By events between the steps: nothing waits for the GPU that would not in training."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]


def _batch(
    rank: int, number: int, plan: Plan, device: torch.device | None
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    size = plan.batch, plan.model.context + 1
    rows = torch.randint(plan.model.vocab, size, generator=generator).to(device or "cpu")
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
