"""What must hold after a recovery: weights, samples, the lost worker."""

from __future__ import annotations

import re
import time
from pathlib import Path

import torch

from rayzero.engine.data.sample_ledger import check_ledger
from rayzero.engine.data.sampling import SampleOrder
from rayzero.workers.messages import (
    Crashed,
    Stopped,
)
from tests.workers import recovery_jobs
from tests.workers.local_workers import LocalWorkers

STEPS = 12


def check_results(local: LocalWorkers, steps: int = STEPS) -> None:
    """The weights are plain torch's, and every sample was consumed once."""
    check_weights(local, steps)
    folder = local.setup.output_dir
    order = SampleOrder(recovery_jobs.LENGTH, local.setup.seed)
    assert check_ledger(f"{folder}/ledger", order, recovery_jobs.SAMPLES) == []


def check_weights(local: LocalWorkers, steps: int = STEPS) -> None:
    """The weights, and the mean of them that each rank of the last generation has kept, if any."""
    weights, ema = recovery_jobs.oracle_with_ema(steps)
    folder = Path(local.setup.output_dir)
    files = [(folder / "weights.pt", weights), *((it, ema) for it in folder.glob("ema-*.pt"))]
    for path, expected in files:
        values = torch.load(path, weights_only=True)
        for name, value in expected.items():
            assert torch.allclose(values[name], value, rtol=1e-9, atol=1e-12), (path.name, name)


def wait_for_lost_worker(local: LocalWorkers, timeout_s: float = 200) -> int:
    """The worker that the vault reports as lost."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        for loss in local.vault.poll(0.5):
            return loss.worker
    raise AssertionError("the vault reported no loss")


LOADED = re.compile(r"step (\d+): (\d+) bytes were moved .* (\d+) copied, (\d+) read")


def stop(local: LocalWorkers, generation: int, members: list[int]) -> None:
    for index in members:
        local.workers[index].call("fence", generation)
        end = local.wait_end(index, generation)
        assert isinstance(end, Stopped | Crashed), local.texts(index)
