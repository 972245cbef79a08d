"""A rank of `compare`: builds one system in a separate process and times its steps."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
import warnings
from collections import deque
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.timeline import profile_exposed
from benchmarks.systems import ALL, Step
from examples.gpt.model import GPT, GPTConfig

BATCHES = 4  # repeated, so that the loss decreases and wrong updates are detected
PROFILED_STEPS = 3
LOSS_STEPS = 5
"""The median of the last losses is compared. On an H200, DDP, DeepSpeed and rayzero alike had
single losses that were off by 5 to 14 %, and right again in the next step: probably of that step's
forward kernels, and not of an update."""
SHARDED = "-sharded"
"""After the name of one of our systems: one rank, which would shard nothing, runs as several do."""
TIMEOUT = timedelta(minutes=2)


@dataclass(frozen=True)
class Plan:
    """Configuration of a measurement.

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
class RankResult:
    """Measurements of one rank of one system.

    Attributes:
        seconds: duration of each timed step, by CUDA events on a GPU and wall time on a CPU.
        loss: of the last steps, on this rank: see `LOSS_STEPS`.
        static_bytes: allocated GPU memory between two steps; None on a CPU.
        peak_bytes: peak of allocated GPU memory; None on a CPU.
        reserved_bytes: GPU memory reserved by the allocator; None on a CPU.
        communication_s: communication per step without overlapping computation; None on a CPU.
        copies_s: the same for copies between host and GPU.
        error: why there is no result; empty on success.
    """

    seconds: list[float]
    loss: float = float("nan")
    static_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    communication_s: float | None = None
    copies_s: float | None = None
    error: str = ""


def rank_main(rank: int, name: str, plan: Plan, folder: str) -> None:
    """Main function of a rank. Writes its result to `folder`, also if the system fails."""
    # set by a launcher; required by some systems
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(plan.ranks))
    if plan.cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.simplefilter("ignore", FutureWarning)  # from peers' use of torch
    backend = "cpu:gloo,cuda:nccl" if plan.cuda else "gloo"
    store = dist.FileStore(f"{folder}/store", plan.ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=plan.ranks, timeout=TIMEOUT)
    try:
        result = _measure(rank, name, plan)
    except Exception as error:  # noqa: BLE001  reported in the table
        traceback.print_exc()
        result = RankResult([], error=f"{type(error).__name__}: {error}".strip().splitlines()[0])
    Path(folder, f"rank{rank}.json").write_text(json.dumps(asdict(result)))
    if result.error:
        sys.exit(1)  # terminates the other ranks, which wait for this one
    dist.barrier()
    dist.destroy_process_group()


def _measure(rank: int, name: str, plan: Plan) -> RankResult:
    device = torch.device("cuda", torch.cuda.current_device()) if plan.cuda else None
    torch.manual_seed(0)
    with device or torch.device("cpu"):
        model = GPT(plan.model)
    step = _build(name, model, plan)
    del model
    batches = [_batch(rank, number, plan, device) for number in range(BATCHES)]
    run_step = _StepRunner(step, batches)
    for _ in range(plan.warmup):
        run_step()
    gc.collect()
    if not plan.cuda:
        seconds = _time_on_host(run_step, plan.steps)
        return RankResult(seconds, run_step.median_loss())
    torch.cuda.synchronize()
    static = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    seconds = _time_on_gpu(run_step, plan.steps)
    loss, peak = run_step.median_loss(), torch.cuda.max_memory_allocated()
    reserved = torch.cuda.memory_reserved()
    exposed = profile_exposed(run_step, PROFILED_STEPS)
    exposed_s = exposed.communication_s, exposed.copies_s
    return RankResult(seconds, loss, static, peak, reserved, *exposed_s)


def _build(name: str, model: GPT, plan: Plan) -> Step:
    """A system of `ALL`, or such a one with the suffix `SHARDED`."""
    build = ALL[name.removesuffix(SHARDED)]
    if not name.endswith(SHARDED):
        return build(model, mixed=plan.mixed)
    from tests.engine.gpu.training import sharded_alone

    if plan.ranks > 1:
        raise ValueError(f"{name} is for one rank: several shard anyway")
    with sharded_alone():
        return build(model, mixed=plan.mixed)


class _StepRunner:
    """Runs successive steps of a system, and keeps the newest losses on the device, so that reading
    them makes no step wait."""

    def __init__(self, step: Step, batches: list[tuple[Tensor, Tensor]]) -> None:
        self._losses: deque[Tensor] = deque(maxlen=LOSS_STEPS)
        self._step = step
        self._batches = batches
        self._number = 0

    def __call__(self) -> None:
        self._losses.append(self._step(*self._batches[self._number % len(self._batches)]))
        self._number += 1

    def median_loss(self) -> float:
        """Of the newest losses; not a number if one of them is not."""
        return float(torch.stack(list(self._losses)).float().median())


def _time_on_host(run_step: _StepRunner, steps: int) -> list[float]:
    seconds = []
    for _ in range(steps):
        start = perf_counter()
        run_step()
        seconds.append(perf_counter() - start)
    return seconds


def _time_on_gpu(run_step: _StepRunner, steps: int) -> list[float]:
    """Time with CUDA events between steps, which adds no synchronization."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        run_step()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]


def _batch(
    rank: int, number: int, plan: Plan, device: torch.device | None
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    size = plan.batch, plan.model.context + 1
    rows = torch.randint(plan.model.vocab, size, generator=generator).to(device or "cpu")
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
