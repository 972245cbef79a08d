"""Python's cost of a training step: the engine's own CPU time by parameter, block and unit.

Collectives take no time here (`dist`'s functions are replaced), the model's tensors are tiny, and
what a plain torch step takes is subtracted: of the engine what remains is hooks, views, counters
and launches, the host time that a GPU has to hide. CPU time of the training thread, so that a
loaded machine disturbs it little; the first decile of rounds in which each system takes a step.
Compare two trees by running this in turn in each.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import quantiles
from time import thread_time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import rayzero
from rayzero.engine import builder
from rayzero.engine.comm import nccl
from rayzero.engine.comm.collectives import Collectives

WORLD = 8
WIDTH = 16
BLOCKS = 32
WARMUP = 20
MATRICES = 7  # of a block, which also has two vectors: nine parameters, as a Llama block has
# A unit for almost every parameter (250 elements each), for almost every block, and whole blocks.
SYSTEMS = {"stage 0": 300, "stage 2": 300, "stage 2, larger units": 2048, "stage 3": None}


class Complete:
    """A collective that took no time."""

    def wait(self) -> bool:
        return True


class FreeDist:
    """torch.distributed on rank 0 of `WORLD`, for the NCCL backend; nothing is sent."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_rank(self, group: Any) -> int:
        return 0

    def get_world_size(self, group: Any) -> int:
        return WORLD

    def all_reduce(self, tensor: Tensor, **_: Any) -> Complete:
        if tensor.numel() < 32:  # the vote, in which each rank counts
            tensor.mul_(WORLD)
        return Complete()

    def broadcast(self, *_: Any, **__: Any) -> Complete:
        return Complete()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.ones(WIDTH))
        self.after = nn.Parameter(torch.ones(WIDTH))
        self.matrices = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(MATRICES)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.before
        for matrix in self.matrices:
            x = x + x @ matrix
        return x * self.after * 0.1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


@dataclass
class System:
    """One way to train; each part of a step is timed by itself. Seconds of every round."""

    parts: dict[str, Callable[..., Any]]
    units: int = 1
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def step(self, x: Tensor) -> None:
        loss = self._time("forward", x)
        self._time("backward", loss)
        for part in list(self.parts)[2:]:
            self._time(part)

    def typical(self, part: str) -> float:
        """Seconds in an undisturbed round: other processes can only add, by evicting caches."""
        return quantiles(self.seconds[part][WARMUP:], n=10)[0]

    def _time(self, part: str, *args: Any) -> Any:
        start = thread_time()
        result = self.parts[part](*args)
        self.seconds.setdefault(part, []).append(thread_time() - start)
        return result


def plain() -> System:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return System({"forward": model, "backward": Tensor.backward, "step": update})


def zero(stage: int, bucket_numel: int | None) -> System:
    sharding: dict[str, Any] = {"stage": stage}
    if bucket_numel:
        sharding["reduce_bucket_size"] = bucket_numel
    engine = rayzero.initialize(
        model=Model(),
        optimizer=lambda groups: torch.optim.AdamW(groups, fused=True),
        config={"train_batch_size": 16, "gradient_clipping": 1.0, "zero_optimization": sharding},
    )[0]
    runtime = engine._runtime
    parts = {
        "forward": engine,
        "backward": engine.backward,
        "step": engine.step,
        "publish": runtime.sync_model_weights,  # once more than the step has done
    }
    return System(parts, len(runtime.units))


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds, by system."""
    torch.manual_seed(0)
    base = plain()
    systems = {name: zero(int(name[6]), numel) for name, numel in SYSTEMS.items()}
    x = torch.randn(2, WIDTH)
    for _ in range(WARMUP + rounds):
        for system in (base, *systems.values()):
            system.step(x)

    def cost(system: System, part: str) -> float:
        return 1e6 * (system.typical(part) - base.typical(part))

    params = (2 + MATRICES) * BLOCKS + 2
    return {
        name: {
            "units": system.units,
            "forward_by_block": cost(system, "forward") / BLOCKS,
            "backward_by_parameter": cost(system, "backward") / params,
            "publish_by_unit": 1e6 * system.typical("publish") / system.units,
        }
        for name, system in systems.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    def free(*_: Any, **__: Any) -> Complete:
        return Complete()

    with (
        patch.object(nccl, "dist", FreeDist()),
        patch.object(nccl, "_all_gather", free),
        patch.object(nccl, "_reduce_scatter", free),
        patch.object(
            builder,
            "connect_collectives",
            lambda: Collectives(nccl.NcclBackend(None)),
        ),
    ):
        rows = measure(args.rounds)
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{'microseconds':24}" + "".join(f"{name:>24}" for name in next(iter(rows.values()))))
    for system, row in rows.items():
        print(f"{system:24}" + "".join(f"{value:24.1f}" for value in row.values()))


if __name__ == "__main__":
    main()
