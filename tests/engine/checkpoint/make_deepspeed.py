"""Makes `deepspeed.zip`: small checkpoints written by DeepSpeed itself, and what is in them.

    python -m tests.engine.checkpoint.make_deepspeed [NAME] [--to FOLDER]

It needs DeepSpeed 0.19.8 beside rayzero's own dependencies and nothing else: two or three gloo
ranks on the CPU, a few seconds a checkpoint. Each checkpoint comes with `oracle.safetensors`: the
whole fp32 weights and moments as DeepSpeed's own accessors gave them in the living job, under the
names of rayzero's state, and compared with DeepSpeed's own consolidation of the files.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

ARCHIVE = Path(__file__).with_name("deepspeed.zip")
STEPS, MICRO_BATCH, VOCAB, WIDTH = 3, 2, 13, 10

OPTIONS = {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}


@dataclass(frozen=True)
class Case:
    """A checkpoint to make.

    Attributes:
        accessors: whether DeepSpeed's accessors can be believed. With `round_robin_gradients` they
            take parameters for one another; then the consolidated files are the oracle.
        consolidates: whether DeepSpeed's own consolidation knows this kind of checkpoint.
    """

    world: int
    zero: dict[str, Any]
    precision: dict[str, Any] = field(default_factory=dict)
    accessors: bool = True
    consolidates: bool = True


BF16 = {"bf16": {"enabled": True}}
CASES = {
    "stage1-fp32": Case(2, {"stage": 1}),
    "stage1-elastic": Case(2, {"stage": 1, "elastic_checkpoint": True}),
    "stage1-bf16": Case(
        2, {"stage": 1}, BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}, consolidates=False
    ),
    "stage2-fp16": Case(2, {"stage": 2}, {"fp16": {"enabled": True, "initial_scale_power": 4}}),
    "stage2-bf16-3-ranks": Case(
        3,
        {"stage": 2, "round_robin_gradients": True, "parameter_alignment": True},
        BF16,
        accessors=False,
    ),
    "stage3-fp32": Case(2, {"stage": 3, "sub_group_size": 100}),
    "stage3-bf16-3-ranks": Case(3, {"stage": 3}, BF16),
}


class Model(nn.Module):
    """A tied, a frozen, a one-element parameter, a buffer, and shapes that divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.shift.to(x.dtype)
        x = x + self.gain * self.down(torch.tanh(self.frozen(self.up(self.norm(x)))))
        return self.head(x).float().square().mean()


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.ndim >= 2], "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


def make(name: str, folder: Path) -> None:
    """Writes one checkpoint and its oracle to `folder / name`."""
    world = CASES[name].world
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    ranks = [
        spawn.Process(target=_rank, args=(rank, world, port, name, str(folder / name)))
        for rank in range(world)
    ]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(120)
    failed = [rank for rank, one in enumerate(ranks) if one.exitcode != 0]
    for one in ranks:
        one.kill()
    if failed:
        raise RuntimeError(f"{name}: ranks {failed} failed or did not finish")
    for script in (folder / name).glob("zero_to_*.py"):
        script.unlink()


def _rank(rank: int, world: int, port: int, name: str, folder: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    import deepspeed  # not a dependency of the project

    case = CASES[name]
    # fp16 arithmetic is slow on CPUs without instructions for it, but all there
    type(deepspeed.get_accelerator()).is_fp16_supported = lambda _: True
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=two_groups(model),
        config={
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "optimizer": {"type": "AdamW", "params": OPTIONS | {"torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            "zero_optimization": case.zero,
        }
        | case.precision,
    )
    torch.manual_seed(1 + rank)
    for _ in range(STEPS):
        engine.backward(engine(torch.randint(0, VOCAB, (MICRO_BATCH, 5))))
        engine.step()
    engine.save_checkpoint(folder)
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # linked before the second group had any state; linked anew, its accessors see all of it
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    state = _living_state(engine.module)
    if rank == 0:
        if not case.accessors:
            state |= _from_files(folder, state)
        elif case.consolidates:
            for key, value in _from_files(folder, state).items():
                torch.testing.assert_close(value, state[key], rtol=0, atol=0)
        save_file(state, f"{folder}/oracle.safetensors")
    deepspeed.comm.barrier()  # rank 0 has the store
    deepspeed.comm.destroy_process_group()


def _living_state(model: nn.Module) -> dict[str, Tensor]:
    """The whole state by DeepSpeed's accessors. Collective."""
    from deepspeed import utils, zero

    state = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            state[f"weights/{name}"] = utils.safe_get_full_fp32_param(param)
            for key in ("exp_avg", "exp_avg_sq"):
                moment = utils.safe_get_full_optimizer_state(param, key)
                state[f"optimizer.{key}/{name}"] = moment
        else:
            with zero.GatheredParameters(param):
                state[f"weights/{name}"] = param.detach().clone()
    state |= {f"buffers/{name}": buffer for name, buffer in model.named_buffers()}
    return {name: one.detach().cpu().clone() for name, one in state.items()}


def _from_files(folder: str, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights and moments by DeepSpeed's consolidation, which knows main weights only: the moments
    are consolidated in a copy of the files that has them in the weights' place."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    state = {}
    with tempfile.TemporaryDirectory() as scratch:
        for kind in ("weights", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
            copied = copytree(folder, f"{scratch}/{kind}")
            if kind != "weights":
                _put_moments_first(Path(copied), kind.removeprefix("optimizer."))
            whole = get_fp32_state_dict_from_zero_checkpoint(copied)
            state |= {f"{kind}/{name}": one.contiguous().clone() for name, one in whole.items()}
    return {
        name: one.to(like[name].dtype).reshape(like[name].shape)
        for name, one in state.items()
        if name in like
    }


def _put_moments_first(folder: Path, key: str) -> None:
    for path in folder.rglob("*_optim_states.pt"):
        content = torch.load(path, weights_only=False)  # DeepSpeed's own, made a moment ago
        state = content["optimizer_state_dict"]
        stage_3 = "fp32_flat_groups" in state
        flats = state["fp32_flat_groups" if stage_3 else "single_partition_of_fp32_groups"]
        inner = state["optimizer_state_dict" if stage_3 else "base_optimizer_state"]
        held = inner if isinstance(inner, list) else list(inner["state"].values())
        for index, flat in enumerate(flats):
            flats[index] = held[index][key][: flat.numel()]
        torch.save(content, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--to", type=Path, help="a folder to write to; default: the archive")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.to or Path(scratch)
        for name in given.names:
            make(name, folder)
        if given.to is None:
            _pack(folder)


def _pack(folder: Path) -> None:
    with zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(one for one in folder.rglob("*") if one.is_file()):
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix())
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED, 9)


if __name__ == "__main__":
    main()
