"""A cell of the matrix, how it is trained, and the plain torch loop that says what is right.

To add an axis (a codec, a place to offload to), give `Cell` a field whose default is off, and put
it into `config`. The oracle only knows what changes numbers: dtype, optimizer, clipping, parts.
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
from tests.engine.offload.training import memory_apart

STEPS, SAMPLES = 4, 24
CLIP = 0.3  # about half of the first steps' norms
SCALE_POWER = 10  # gradients are far from both ends of fp16
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
Result = tuple[list[float], dict[str, Tensor], float]


@dataclass(frozen=True)
class Cell:
    """One combination. The world is given to the process, not to the cell."""

    stage: int
    precision: str
    micro_steps: int = 1
    clip: float = 0.0
    optimizer: str = "sgd"
    overlap: bool = True
    bucket: int = 150
    offload: str = ""  # of OFFLOADS
    apart: bool = False  # host memory is copied from and to, as with a GPU
    more: tuple[tuple[str, Any], ...] = ()  # other keys of the config
    shape: Shape = SHAPE

    def config(self) -> dict[str, Any]:
        return {
            "train_batch_size": SAMPLES,
            "gradient_accumulation_steps": self.micro_steps,
            "gradient_clipping": self.clip,
            "bf16": {"enabled": self.precision == "bf16"},
            "fp16": {
                "enabled": self.precision == "fp16",
                "initial_scale_power": SCALE_POWER,
                "loss_scale_window": 3,
            },
            "zero_optimization": {
                "stage": self.stage,
                "overlap_comm": self.overlap,
                "reduce_bucket_size": self.bucket,
                **OFFLOADS[self.offload],
            },
            **dict(self.more),
        }


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Small(nn.Module):
    """Few blocks, and an embedding tied to the head: small, so that a cell costs little."""

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


def make(precision: str, seed: int = 0, shape: Shape = SHAPE) -> Small:
    torch.manual_seed(seed)
    return Small(shape).to(torch.float64 if precision == "fp64" else torch.float32)


def train(rank: int, world: int, cells: list[Cell]) -> list[Result]:
    """All cells, one after another; each one's losses, weights (rank 0's), and last norm."""
    return [_train(rank, max(world, 1), cell) for cell in cells]


def _train(rank: int, ranks: int, cell: Cell) -> Result:
    model = make(cell.precision, rank, cell.shape)
    with memory_apart() if cell.apart else nullcontext():
        engine, *_ = rayzero.initialize(
            model=model,
            model_parameters=zoo.two_groups(model),
            optimizer=OPTIMIZERS[cell.optimizer],
            config=cell.config(),
        )
    losses = []
    for batch in zoo.batches(STEPS, SAMPLES):
        for part in batch.chunk(ranks)[rank].chunk(cell.micro_steps):
            engine.backward(engine(part[:, :-1], targets=part[:, 1:])["loss"])
            engine.step()
        losses.append(engine.metrics.loss)
    assert engine.metrics.skipped_steps == 0
    state, norm = engine.state_dict(), engine.metrics.grad_norm
    engine.close()
    return losses, state, norm


@cache
def oracle(precision: str, optimizer: str, clip: float, parts: int, shape: Shape) -> Result:
    """Plain torch in one process, the batch in as many parts as the ranks' micro-steps are."""
    data, model = list(zoo.batches(STEPS, SAMPLES)), make(precision, 0, shape)
    norms: list[float] = []

    def noting(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made = OPTIMIZERS[optimizer](groups)
        step = made.step

        def note(*args: Any) -> Any:
            grads = [p.grad for group in made.param_groups for p in group["params"]]
            norms.append(torch.nn.utils.get_total_norm(grads).item())
            return step(*args)

        made.step = note  # type: ignore[method-assign]
        return made

    if precision in ("fp64", "fp32"):
        losses, state = zoo.plain(model, noting, data, clip)
    else:
        scale = 2.0**SCALE_POWER if precision == "fp16" else 1.0
        losses, state = zoo.plain_mixed(model, noting, data, clip, parts, DTYPES[precision], scale)
    return losses, state, norms[-1]


def oracle_of(cell: Cell, ranks: int) -> Result:
    mixed = cell.precision in ("bf16", "fp16")
    parts = ranks * cell.micro_steps if mixed else 1
    return oracle(cell.precision, cell.optimizer, cell.clip, parts, cell.shape)
