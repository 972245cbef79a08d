"""Generate `deepspeed.zip`: small checkpoints written by DeepSpeed, and their expected content.

    python -m tests.engine.checkpoint.make_deepspeed [NAME] [--to FOLDER]

Requires DeepSpeed 0.19.8 and rayzero's dependencies. Uses two or three gloo ranks on the CPU and
takes a few seconds per checkpoint. Each checkpoint comes with `oracle.safetensors`: the full fp32
weights and moments, read through DeepSpeed's accessors in the running job, under the names of
rayzero's state. They are compared with DeepSpeed's consolidation of the files.
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

from tests.engine.zoo import two_groups

ARCHIVE = Path(__file__).with_name("deepspeed.zip")
STEPS, MICRO_BATCH, VOCAB, WIDTH = 3, 2, 13, 10

OPTIONS = {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}


@dataclass(frozen=True)
class Case:
    """A checkpoint to generate.

    Attributes:
        accessors: whether DeepSpeed's accessors are correct. With `round_robin_gradients` they mix
            up parameters; then the consolidated files are the oracle.
        consolidates: whether DeepSpeed's consolidation supports this kind of checkpoint.
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
    """A tied, a frozen and a one-element parameter, a buffer, shapes without common divisors."""

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


def make(name: str, folder: Path) -> None:
    """Write the checkpoint and its oracle to `folder / name`."""
    world = CASES[name].world
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=_run_rank, args=(rank, world, port, name, str(folder / name)))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
    for process in processes:
        process.kill()
    if failed:
        raise RuntimeError(f"{name}: ranks {failed} failed or did not finish")
    for script in (folder / name).glob("zero_to_*.py"):
        script.unlink()


def _run_rank(rank: int, world: int, port: int, name: str, folder: str) -> None:
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
    # DeepSpeed disables fp16 on CPUs without native instructions, but PyTorch supports it
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
        # linked before the second group had state; the accessors need the links of all groups
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    state = _state_from_accessors(engine.module)
    if rank == 0:
        if not case.accessors:
            state |= _state_from_files(folder, state)
        elif case.consolidates:
            for key, value in _state_from_files(folder, state).items():
                torch.testing.assert_close(value, state[key], rtol=0, atol=0)
        save_file(state, f"{folder}/oracle.safetensors")
    deepspeed.comm.barrier()  # rank 0 hosts the store
    deepspeed.comm.destroy_process_group()


def _state_from_accessors(model: nn.Module) -> dict[str, Tensor]:
    """The full state, read through DeepSpeed's accessors. Collective."""
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
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def _state_from_files(folder: str, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights and moments from DeepSpeed's consolidation.

    It only reads main weights, so the moments are written in their place in a copy of the files.
    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    state = {}
    with tempfile.TemporaryDirectory() as scratch:
        for kind in ("weights", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
            copy = copytree(folder, f"{scratch}/{kind}")
            if kind != "weights":
                _replace_weights_by_moments(Path(copy), kind.removeprefix("optimizer."))
            tensors = get_fp32_state_dict_from_zero_checkpoint(copy)
            state |= {f"{kind}/{name}": t.contiguous().clone() for name, t in tensors.items()}
    return {
        name: tensor.to(like[name].dtype).reshape(like[name].shape)
        for name, tensor in state.items()
        if name in like
    }


def _replace_weights_by_moments(folder: Path, key: str) -> None:
    for path in folder.rglob("*_optim_states.pt"):
        content = torch.load(path, weights_only=False)  # written by this script
        state = content["optimizer_state_dict"]
        stage_3 = "fp32_flat_groups" in state
        flats = state["fp32_flat_groups" if stage_3 else "single_partition_of_fp32_groups"]
        inner = state["optimizer_state_dict" if stage_3 else "base_optimizer_state"]
        moments = inner if isinstance(inner, list) else list(inner["state"].values())
        for index, flat in enumerate(flats):
            flats[index] = moments[index][key][: flat.numel()]
        torch.save(content, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--to", type=Path, help="output folder; default: the archive")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.to or Path(scratch)
        for name in args.names:
            make(name, folder)
        if args.to is None:
            _pack(folder)


def _pack(folder: Path) -> None:
    with zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix())
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED, 9)


if __name__ == "__main__":
    main()
