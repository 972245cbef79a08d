"""Trains a case on virtual ranks, and says what was found."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import torch
from torch import nn

import rayzero
from tests.support.races.cases import Case
from tests.support.races.models import MODELS, make_batch
from tests.support.virtual_device.machine import Machine
from tests.support.virtual_device.nccl import Alone, Ranks
from tests.support.virtual_device.placement import DEVICE
from tests.support.virtual_device.rank import virtual_cluster, virtual_rank

STEPS = 3  # buffers are assigned after the first, weights prefetched in the second


@dataclass
class Findings:
    """What one rank of a case did wrong.

    Attributes:
        error: of a case that could not run.
        syncs_per_step: what the host waits for in a step, on average.
    """

    case: Case
    races: Counter[str] = field(default_factory=Counter)
    early_frees: Counter[str] = field(default_factory=Counter)
    error: str | None = None
    syncs_per_step: dict[str, float] = field(default_factory=dict)
    operators: int = 0
    peak_bytes: int = 0
    launches: list[tuple[str, str, int, str]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return not (self.races or self.early_frees or self.error)

    def __str__(self) -> str:
        found = [f"race:\n    {it}" for it in self.races]
        found += [f"freed early: {it}" for it in self.early_frees]
        found += [self.error] if self.error else []
        return f"{self.case}: " + "\n  ".join(found or ["clean"])


def run_case(case: Case, rank: int = 0, steps: int = STEPS) -> Findings:
    """Trains one rank of a case, whose other ranks have the same values."""
    with virtual_cluster(Alone(rank, case.world_size)):
        return _train(case, steps)


def run_ranks(case: Case, steps: int = STEPS) -> list[Findings]:
    """Trains all ranks of a case in threads, which exchange their values."""
    ranks = Ranks(case.world_size)
    findings = [Findings(case) for _ in range(case.world_size)]

    def run(rank: int) -> None:
        ranks.as_rank(rank)
        findings[rank] = _train(case, steps, rank)
        if findings[rank].error:
            ranks.abort()

    with virtual_cluster(ranks):
        threads = [Thread(target=run, args=(rank,)) for rank in range(case.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return findings


def _train(case: Case, steps: int, seed: int = 0) -> Findings:
    findings, started_s = Findings(case), time.perf_counter()
    with virtual_rank() as machine:
        try:
            engine = build_engine(case)
            before = _steps(engine, case, machine, 1, seed)
            after = _steps(engine, case, machine, steps - 1, seed + 100)
            findings.syncs_per_step = {
                what: count / (steps - 1) for what, count in (after - before).items()
            }
            _read_state(engine)
            engine.close()
        except Exception as error:  # noqa: BLE001  a finding
            findings.error = f"{type(error).__name__}: {error}"
    findings.races, findings.early_frees = machine.memory.races, machine.memory.early_frees
    findings.operators, findings.peak_bytes = machine.operators, machine.memory.peak_bytes
    findings.launches, findings.seconds = machine.launches, time.perf_counter() - started_s
    return findings


def build_engine(case: Case) -> Any:
    """An engine with a model on the virtual device."""
    with torch.random.fork_rng(devices=[]), torch.device(DEVICE):
        torch.manual_seed(0)
        model: nn.Module = MODELS[case.model]()
    return rayzero.initialize(model=model, config=case.config())[0]


def _read_state(engine: Any) -> None:
    """All that a mirror or checkpoint reads between two steps: weights and optimizer state, on the
    device, in host memory, in files."""
    engine.state_dict()
    optimizer = engine._step.optimizer
    for shard in optimizer.shards:
        for tensor in (shard.weight.detach(), *optimizer.state_tensors(shard).values()):
            tensor.sum()


def _steps(engine: Any, case: Case, machine: Machine, steps: int, seed: int) -> Counter[str]:
    """Trains; what the host has waited for so far."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for _ in range(case.micro_steps):
            batch = make_batch(case.model, generator).pin_memory().to(DEVICE, non_blocking=True)
            engine.backward(engine(batch))
            engine.step()
        may_overflow = case.precision == "fp16"  # then the step is skipped
        if not may_overflow and engine.metrics.grad_norm != engine.metrics.grad_norm:
            raise FloatingPointError("the gradient's norm is not a number")
    return machine.host_syncs.copy()
