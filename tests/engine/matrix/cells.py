"""Cells of the test matrix: configuration, training, and the plain PyTorch reference.

To add an axis (a codec, an offload device), add a field to `Cell` whose default is off and use it
in `config`. The reference only models what changes numbers: dtype, optimizer, clipping, and the
number of parts that a batch is accumulated over.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from tempfile import gettempdir
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rayzero
from tests.engine import zoo
from tests.engine.offload.training import separate_host_memory

STEPS, SAMPLES = 3, 24
CLIP = 0.3  # about half of the gradient norm of the first steps
SCALE_POWER = 10  # scaled gradients neither overflow nor underflow fp16
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, eps=1e-4),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.3, momentum=0.9),
}
SHAPE = 12, 17, 2  # width, hidden width, blocks
Shape = tuple[int, int, int]
CPU = {"offload_optimizer": {"device": "cpu"}}
NVME = {
    "offload_optimizer": {"device": "nvme", "nvme_path": gettempdir(), "buffer_count": 3},
    "sub_group_size": 96,
}
PARAM = {"offload_param": {"device": "cpu"}}
OFFLOADS: dict[str, dict[str, Any]] = {
    "": {},
    "cpu": CPU,
    "half": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "nvme": NVME,
    "weights": PARAM,  # stage 3
    "param": CPU | PARAM,
    "nvme and param": NVME | PARAM,
}
TrainResult = tuple[list[float], dict[str, Tensor], float]


@dataclass(frozen=True)
class Cell:
    """One combination of settings. The world size is an argument of `run_ranks`."""

    stage: int
    precision: str
    micro_steps: int = 1
    clip: float = 0.0
    optimizer: str = "sgd"
    overlap: bool = True
    bucket: int = 150
    offload: str = ""  # a key of OFFLOADS
    separate_memory: bool = False  # copy between device and host memory, as on a GPU
    extra: tuple[tuple[str, Any], ...] = ()  # other top-level config keys
    shape: Shape | None = SHAPE  # None: `zoo.IrregularModel`

    def config(self) -> dict[str, Any]:
        return {
            "train_batch_size": SAMPLES,
            "gradient_accumulation_steps": self.micro_steps,
            "gradient_clipping": self.clip,
            "bf16": {"enabled": self.precision == "bf16"},
            "fp16": {
                "enabled": self.precision == "fp16",
                "initial_scale_power": SCALE_POWER,
                "loss_scale_window": 2,  # the last step is at a larger scale
            },
            "zero_optimization": {
                "stage": self.stage,
                "overlap_comm": self.overlap,
                "reduce_bucket_size": self.bucket,
                **OFFLOADS[self.offload],
            },
            **dict(self.extra),
        }


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class SmallModel(nn.Module):
    """A few blocks and an embedding tied to the head; small, so that a cell is cheap to train."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden, blocks = shape
        self.embed = nn.Embedding(zoo.VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.head = nn.Linear(width, zoo.VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, -2), targets.flatten())}


def make_model(precision: str, seed: int = 0, shape: Shape | None = SHAPE) -> Any:
    torch.manual_seed(seed)
    model = zoo.IrregularModel() if shape is None else SmallModel(shape)
    return model.to(torch.float64 if precision == "fp64" else torch.float32)


def train(rank: int, world: int, cells: list[Cell]) -> list[TrainResult]:
    """Train every cell; return losses, rank 0's state dict and the last gradient norm of each."""
    return [_train_cell(rank, max(world, 1), cell) for cell in cells]


def _train_cell(rank: int, world: int, cell: Cell) -> TrainResult:
    model = make_model(cell.precision, rank, cell.shape)
    with separate_host_memory() if cell.separate_memory else nullcontext():
        engine, *_ = rayzero.initialize(
            model=model,
            model_parameters=zoo.two_groups(model),
            optimizer=OPTIMIZERS[cell.optimizer],
            config=cell.config(),
        )
    losses = zoo.train(engine, zoo.batches(STEPS, SAMPLES), cell.micro_steps)
    assert engine.metrics.skipped_steps == 0
    state, norm = engine.state_dict(), engine.metrics.grad_norm
    engine.close()
    return losses, state, norm


@cache
def _train_reference(
    precision: str, optimizer: str, clip: float, parts: int, shape: Shape | None
) -> TrainResult:
    """Train with plain PyTorch in one process, accumulating each batch over `parts` parts."""
    data, model = list(zoo.batches(STEPS, SAMPLES)), make_model(precision, 0, shape)
    norms: list[float] = []

    def make_optimizer(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        instance = OPTIMIZERS[optimizer](groups)
        step = instance.step

        def record_norm_and_step(*args: Any) -> Any:
            grads = [p.grad for group in instance.param_groups for p in group["params"]]
            norms.append(torch.nn.utils.get_total_norm(grads).item())
            return step(*args)

        instance.step = record_norm_and_step  # type: ignore[method-assign]
        return instance

    if precision in ("fp64", "fp32"):
        losses, state = zoo.train_reference(model, make_optimizer, data, clip)
    else:
        scale = 2.0**SCALE_POWER if precision == "fp16" else 1.0
        losses, state = zoo.train_mixed_reference(
            model, make_optimizer, data, clip, parts, DTYPES[precision], scale
        )
    return losses, state, norms[-1]


def reference(cell: Cell, world: int) -> TrainResult:
    """What `train` of this cell must return, from plain PyTorch."""
    mixed = cell.precision in ("bf16", "fp16")
    parts = world * cell.micro_steps if mixed else 1
    return _train_reference(cell.precision, cell.optimizer, cell.clip, parts, cell.shape)
