"""A training on a GPU, and plain torch's on the same device to hold it against.

One rank's stages would all be the same row, and its collectives nothing. `alone_on_nccl` keeps the
rows and sends everything through NCCL all the same, so one GPU sees the collectives, the streams
and the slots that several do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import rayzero
from rayzero.engine import builder
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.comm.nccl import NcclBackend
from rayzero.engine.zero.placement import Stage
from tests.engine import zoo

STEPS, SAMPLES, CLIP = 6, 12, 0.5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
SCALE_POWER = 8  # of fp16, and it never changes: the oracle has no scaler
Outcome = tuple[list[float], dict[str, Tensor]]


@contextmanager
def alone_on_nccl(store: Path) -> Iterator[None]:
    """One rank whose collectives are NCCL's, at stages that shard. `store`: a file to be made."""
    file = dist.FileStore(str(store), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=file, rank=0, world_size=1)
    connect, on = builder.connect_collectives, Stage.for_world_size
    backend = NcclBackend(dist.group.WORLD)
    builder.connect_collectives = lambda: (Collectives(backend), torch.device("cuda", 0))
    Stage.for_world_size = lambda self, world_size, *, moves=False: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        builder.connect_collectives, Stage.for_world_size = connect, on  # type: ignore[method-assign]
        dist.destroy_process_group()


def config(stage: int, precision: str = "fp32", micro_steps: int = 1, **zero: Any) -> dict:
    fp16 = {"initial_scale_power": SCALE_POWER, "loss_scale_window": 1000, "hysteresis": 1}
    return {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16", **fp16},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 150, **zero},
    }


def make_engine(settings: dict, precision: str = "fp32", seed: int = 0) -> rayzero.Engine:
    model = zoo.make(torch.float64 if precision == "fp64" else torch.float32, seed)
    return rayzero.initialize(
        model=model,
        model_parameters=zoo.two_groups(model),
        optimizer=zoo.sgd,
        config=settings,
    )[0]


def run_steps(engine: rayzero.Engine, steps: Sequence[int]) -> list[float]:
    """The loss of each step."""
    data = list(zoo.batches(max(steps) + 1, SAMPLES))
    losses = []
    for step in steps:
        part = data[step].chunk(engine.world_size)[engine.rank].to(engine.device)
        for micro in part.chunk(engine.settings.batches.micro_steps):
            loss = engine(micro[:, :-1], targets=micro[:, 1:])["loss"]
            engine.backward(loss)
            engine.step()
        losses.append(engine.metrics.loss)
    return losses


def train(settings: dict, precision: str = "fp32") -> Outcome:
    engine = make_engine(settings, precision)
    losses = run_steps(engine, range(STEPS))
    outcome = losses, engine.state_dict()
    engine.close()
    return outcome


def plain(precision: str, parts: int) -> Outcome:
    """Nothing but torch, on the same device."""
    data = [batch.to(DEVICE) for batch in zoo.batches(STEPS, SAMPLES)]
    model = zoo.make(torch.float64 if precision == "fp64" else torch.float32).to(DEVICE)
    if precision in ("fp64", "fp32"):
        return zoo.plain(model, zoo.sgd, data, CLIP)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    scale = 2.0**SCALE_POWER if precision == "fp16" else 1.0
    return zoo.plain_mixed(model, zoo.sgd, data, CLIP, parts, dtype, scale)


def differs(seen: Outcome, right: Outcome, precision: str) -> float:
    """The largest relative difference, of losses and weights."""
    distance = zoo.relative_l2 if precision in ("bf16", "fp16") else zoo.relative
    losses = [abs(a - b) / abs(b) for a, b in zip(seen[0], right[0], strict=True)]
    return max([*losses, *(distance(seen[1][name], right[1][name].cpu()) for name in right[1])])


def several_fit() -> bool:
    """Whether two ranks can be on NCCL: on a GPU each, or on one where NCCL allows it."""
    return torch.cuda.device_count() > 1 or torch.cuda.nccl.version()[:2] >= (2, 30)
