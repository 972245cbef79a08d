"""Training on a GPU, and the plain PyTorch reference on the same device.

With world size 1 the engine normally shards nothing and skips collectives. `single_rank_group`
disables both shortcuts, so one GPU runs the collectives, streams and gather slots of several. In a
dry run without a GPU collectives are copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rayzero.engine import builder
from rayzero.engine.comm.backend import Backend
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.comm.nccl import NcclBackend
from rayzero.engine.comm.process_group import SingleRankBackend
from rayzero.engine.zero.placement import Stage
from tests.engine import zoo
from tests.engine.offload import training
from tests.engine.offload.training import CLIP, SAMPLES, SCALE_POWER, TrainResult

STEPS = 6
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
DTYPES = {  # of the model that is given to the engine
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.float32,
    "fp16": torch.float32,
}


@contextmanager
def single_rank_group(store: Path) -> Iterator[None]:
    """Use NCCL collectives (without a GPU: copies) and sharded stages with one rank.

    Args:
        store: path of the FileStore to create.
    """
    file = dist.FileStore(str(store), 1)
    name = "cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(name, store=file, rank=0, world_size=1)
    try:
        with sharded_alone():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def sharded_alone() -> Iterator[None]:
    """The same in the default process group, of one rank; for the engines that are built inside."""
    connect, for_world_size = builder.connect_collectives, Stage.for_world_size
    cuda = DEVICE.type == "cuda"
    backend: Backend = NcclBackend(dist.group.WORLD) if cuda else SingleRankBackend()
    device = torch.device("cuda", 0) if cuda else DEVICE
    builder.connect_collectives = lambda: Collectives(backend, device)
    Stage.for_world_size = lambda self, world_size, *, is_fixed=True: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        builder.connect_collectives, Stage.for_world_size = connect, for_world_size  # type: ignore[method-assign]


def train(settings: dict[str, Any], precision: str = "fp32") -> TrainResult:
    return training.train(settings, STEPS, zoo.sgd, 0, DTYPES[precision])


def train_reference(precision: str, parts: int) -> TrainResult:
    """Train with plain PyTorch on the same device."""
    data = [batch.to(DEVICE) for batch in zoo.batches(STEPS, SAMPLES)]
    model = zoo.make_model(DTYPES[precision]).to(DEVICE)
    if precision in ("fp64", "fp32"):
        return zoo.train_reference(model, zoo.sgd, data, CLIP)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    scale = 2.0**SCALE_POWER if precision == "fp16" else 1.0
    return zoo.train_mixed_reference(model, zoo.sgd, data, CLIP, parts, dtype, scale)


def max_error(actual: TrainResult, expected: TrainResult, precision: str) -> float:
    """Largest relative error of losses and weights."""
    distance = zoo.relative_l2_error if precision in ("bf16", "fp16") else zoo.relative_error
    losses = [abs(a - b) / abs(b) for a, b in zip(actual[0], expected[0], strict=True)]
    weights = [distance(actual[1][name], value.cpu()) for name, value in expected[1].items()]
    return max(losses + weights)


def supports_two_ranks() -> bool:
    """Whether two ranks can use NCCL: on separate GPUs, or on one if NCCL allows sharing it."""
    return torch.cuda.device_count() > 1 or torch.cuda.nccl.version()[:2] >= (2, 30)
