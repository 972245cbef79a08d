"""Trains a case on virtual ranks, and says what was found."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

import rayzero
from tests.support.races.cases import Case
from tests.support.races.models import MODELS, make_batch
from tests.support.races.scripts import Plain, make_script
from tests.support.virtual_device.machine import Machine
from tests.support.virtual_device.nccl import Alone, Ranks
from tests.support.virtual_device.placement import DEVICE
from tests.support.virtual_device.rank import virtual_cluster, virtual_rank


@dataclass(frozen=True)
class _Outcome:
    """What a wait that is left out may change without a race.

    Attributes:
        results: a digest of losses, norms and weights.
        launches: as in `Findings`.
        peak_bytes: of device memory.
        most_in_flight: collectives that were not waited for.
        messages: warnings that the product logged; what a mirror told the controller and vault.
    """

    results: str
    launches: tuple[tuple[str, str, int, str], ...]
    peak_bytes: int
    most_in_flight: int
    messages: tuple[str, ...]

    def first_difference(self, other: _Outcome) -> str | None:
        """The field in which another run of the same case differs."""
        for name in (it.name for it in fields(self)):
            if getattr(self, name) != getattr(other, name):
                return name
        return None


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(str(record.msg))

    @contextmanager
    def collected(self) -> Iterator[None]:
        log = logging.getLogger("rayzero")
        log.addHandler(self)
        try:
            yield
        finally:
            log.removeHandler(self)


@dataclass
class Findings:
    """What one rank of a case did wrong.

    Attributes:
        error: of a case that could not run.
        outcome: None after an error.
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
    outcome: _Outcome | None = None
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return not (self.races or self.early_frees or self.error)

    def __str__(self) -> str:
        found = [f"race:\n    {it}" for it in self.races]
        found += [f"freed early: {it}" for it in self.early_frees]
        found += [self.error] if self.error else []
        return f"{self.case}: " + "\n  ".join(found or ["clean"])


def run_case(case: Case, rank: int = 0) -> Findings:
    """Trains one rank of a case, whose other ranks have the same values."""
    with virtual_cluster(Alone(rank, case.world_size)):
        return _train(case)


def run_ranks(case: Case) -> list[Findings]:
    """Trains all ranks of a case in threads, which exchange their values."""
    ranks = Ranks(case.world_size)
    findings = [Findings(case) for _ in range(case.world_size)]

    def run(rank: int) -> None:
        findings[rank] = _train(case, rank)
        if findings[rank].error:
            ranks.abort()

    with virtual_cluster(ranks):
        ranks.run(run)
    return findings


def _train(case: Case, seed: int = 0) -> Findings:
    findings, started_s = Findings(case), time.perf_counter()
    script, warnings = make_script(case.script), _Warnings()
    with virtual_rank() as machine, warnings.collected():
        try:
            with script.running():
                engine = build_engine(case)
                results = _train_steps(engine, case, script, machine, findings, seed)
            findings.outcome = _Outcome(
                results,
                tuple(machine.launches),
                machine.memory.peak_bytes,
                machine.most_in_flight,
                (*script.log, *warnings.texts),
            )
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
    """All that a checkpoint reads between two steps beside weights: optimizer state, on the device,
    in host memory, in files."""
    optimizer = engine._step.optimizer
    for shard in optimizer.shards:
        for tensor in (shard.weight.detach(), *optimizer.state_tensors(shard).values()):
            tensor.sum()


def _train_steps(
    engine: Any, case: Case, script: Plain, machine: Machine, findings: Findings, seed: int
) -> str:
    """Trains; a digest of losses, norms and weights."""
    generator = torch.Generator().manual_seed(seed)
    digest, number, before = hashlib.sha256(), 0, Counter[str]()
    for step in range(script.steps):
        if step == 1:
            before = machine.host_syncs.copy()
        for last in [False] * (case.micro_steps - 1) + [True]:
            batch = make_batch(case.model, generator).pin_memory().to(DEVICE, non_blocking=True)
            script.backward(engine, script.loss(engine, batch, number))
            if last:
                script.before_step(engine, step)
            engine.step()
            number += 1
        may_overflow = case.precision == "fp16"  # then the step is skipped
        if not may_overflow and engine.metrics.grad_norm != engine.metrics.grad_norm:
            raise FloatingPointError("the gradient's norm is not a number")
        digest.update(f"{engine.metrics.loss} {engine.metrics.grad_norm}".encode())
        if step == script.steps - 1:
            new = machine.host_syncs - before
            findings.syncs_per_step = {it: n / (script.steps - 1) for it, n in new.items()}
        script.after_step(engine, step)
    for name, tensor in engine.state_dict().items():
        digest.update(name.encode() + repr(tensor.tolist()).encode())
    _read_state(engine)
    engine.close()
    return digest.hexdigest()
