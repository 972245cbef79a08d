"""Training on a GPU equals plain torch on it, whatever runs beside what."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rayzero
from rayzero.engine.config.sections import Fp16Config
from rayzero.engine.precision.loss_scale import DynamicScaler
from tests.engine import zoo
from tests.engine.gpu.training import (
    DEVICE,
    SAMPLES,
    STEPS,
    TOLERANCE,
    Outcome,
    alone_on_nccl,
    config,
    differs,
    make_engine,
    plain,
    run_steps,
    several_fit,
    train,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu
SLEEP_CYCLES = 2_000_000  # about a millisecond: longer than any kernel or copy here
CPU = {"offload_optimizer": {"device": "cpu"}}
PARAM = {"offload_param": {"device": "cpu"}}


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("nccl", [False, True], ids=["local", "nccl"])
def test_equals_plain_torch(
    nccl: bool, stage: int, precision: str, micro_steps: int, tmp_path: Path
) -> None:
    with alone_on_nccl(tmp_path / "store") if nccl else nullcontext():
        seen = train(config(stage, precision, micro_steps), precision)
    assert differs(seen, plain(precision, micro_steps), precision) <= TOLERANCE[precision]


def offloads(stage: int, folder: Path) -> dict[str, dict[str, Any]]:
    place = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 3}
    half = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    nvme = {"offload_optimizer": place, "sub_group_size": 64}
    found = {"cpu": CPU, "half": half, "nvme": nvme}
    return found | ({"param": PARAM, "both": CPU | PARAM} if stage == 3 else {})


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("nccl", [False, True], ids=["local", "nccl"])
def test_offload_equals_plain_torch(
    nccl: bool, stage: int, precision: str, micro_steps: int, tmp_path: Path
) -> None:
    right = plain(precision, micro_steps)
    for name, offload in offloads(stage, tmp_path).items():
        with alone_on_nccl(tmp_path / f"store {name}") if nccl else nullcontext():
            seen = train(config(stage, precision, micro_steps, **offload), precision)
        assert differs(seen, right, precision) <= TOLERANCE[precision], name


class Late(torch.autograd.Function):
    """The GPU stands still for a while, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.cuda._sleep(SLEEP_CYCLES)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        torch.cuda._sleep(SLEEP_CYCLES)
        return grad.clone()


class LateBlock(nn.Module):
    """What it computes is there long after its kernels were enqueued."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + Late.apply(self.down(Late.apply(torch.tanh(self.up(x)))))


def late_training(stage: int, *, late: bool, **zero: Any) -> Outcome:
    """Bits of a training in which the compute stream is behind all others, or is not."""
    torch.manual_seed(0)
    model = nn.Sequential(*(LateBlock() for _ in range(4)))
    document = config(stage, "bf16", 2, **zero)
    engine = rayzero.initialize(
        model=model, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), config=document
    )[0]
    sleep = torch.cuda._sleep
    torch.cuda._sleep = sleep if late else lambda cycles: None  # type: ignore[assignment]
    losses = []
    try:
        generator = torch.Generator().manual_seed(1)
        for _ in range(2 * 3):
            x = torch.randn(SAMPLES // 2, 16, generator=generator).to(DEVICE)
            engine.backward(engine(x).float().square().mean())
            engine.step()
            losses.append(float(engine.metrics.loss or 0.0))
        return losses, engine.state_dict()
    finally:
        torch.cuda._sleep = sleep
        engine.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_stream_runs_ahead_of_another(stage: int, tmp_path: Path) -> None:
    """Same bits with overlap and without, with the compute stream late and in time."""
    ways: list[dict[str, Any]] = [{"overlap_comm": True}, CPU, CPU | {"overlap_comm": False}]
    ways += [PARAM, CPU | PARAM] if stage == 3 else []
    with alone_on_nccl(tmp_path / "store"):
        right = late_training(stage, late=False, overlap_comm=False)
        for late in (True, False):
            for way in ways:
                losses, state = late_training(stage, late=late, **way)
                assert losses == right[0], (late, way)
                assert all(torch.equal(state[name], right[1][name]) for name in state), (late, way)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_overflow_halves_the_scale_and_changes_nothing_else(stage: int, tmp_path: Path) -> None:
    rules = DynamicScaler(Fp16Config(initial_scale_power=8, loss_scale_window=2, hysteresis=1))
    document = config(stage, "fp16")
    document["fp16"]["loss_scale_window"] = 2
    with alone_on_nccl(tmp_path / "store"):
        engine = make_engine(document)
        for batch, overflow in zip(zoo.batches(6, SAMPLES), "..x..x", strict=True):
            before = engine.state_dict()
            given = batch.to(DEVICE)
            loss = engine(given[:, :-1], targets=given[:, 1:])["loss"]
            engine.backward(loss * float("inf") if overflow == "x" else loss)
            engine.step()
            rules.update(overflow=overflow == "x")
            assert engine.loss_scale == rules.value
            same = all(torch.equal(one, before[name]) for name, one in engine.state_dict().items())
            assert same is (overflow == "x")
        assert engine.skipped_steps == 2


@pytest.mark.parametrize("offload", [{}, CPU], ids=["device", "cpu"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_is_that_of_the_third_step_for_good(
    stage: int, offload: dict[str, Any], tmp_path: Path
) -> None:
    with alone_on_nccl(tmp_path / "store"):
        engine = make_engine(config(stage, "bf16", 2, **offload), "bf16")
        run_steps(engine, range(3))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run_steps(engine, range(3, 5))
        allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        run_steps(engine, range(5, 15))
        assert torch.cuda.memory_allocated() == allocated
        assert torch.cuda.max_memory_allocated() == peak
        engine.close()


@pytest.mark.parametrize("offload", [{}, CPU | PARAM], ids=["device", "all on the cpu"])
def test_a_checkpoint_brings_back_the_same_bits(offload: dict[str, Any], tmp_path: Path) -> None:
    with alone_on_nccl(tmp_path / "store"):
        engine = make_engine(config(3, "bf16", **offload))
        run_steps(engine, range(2))
        engine.save_checkpoint(tmp_path / "saved")
        run_steps(engine, range(2, 4))
        other = make_engine(config(3, "bf16", **offload), seed=9)
        other.load_checkpoint(tmp_path / "saved")
        run_steps(other, range(2, 4))
        right, seen = engine.state_dict(), other.state_dict()
        assert all(torch.equal(seen[name], right[name]) for name in right)


def on_nccl(rank: int, world: int, stage: int, precision: str, store: str) -> Outcome:
    dist.destroy_process_group()  # the gloo group that ranks are called with
    os.environ.update(NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_NVLS_ENABLE="0")
    os.environ["LOCAL_RANK"] = str(rank)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    file = dist.FileStore(store, world)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=file, rank=rank, world_size=world)
    return train(config(stage, precision), precision)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_equal_plain_torch(stage: int, precision: str, tmp_path: Path) -> None:
    if not several_fit():
        pytest.skip("one GPU, and NCCL is older than 2.30, which allows several ranks on it")
    store = str(tmp_path / "store")
    (losses, state), _ = run_ranks(2, on_nccl, stage, precision, store, timeout_s=120.0)
    assert differs((losses, state), plain(precision, 2), precision) <= TOLERANCE[precision]


def test_utilisation_and_bytes_are_told() -> None:
    engine = make_engine(config(0, "bf16"))
    run_steps(engine, range(STEPS))
    metrics = engine.metrics
    assert metrics.tokens_per_s is not None
    assert (metrics.mfu is None) == (metrics.flops_per_s is None)  # a GPU with or without a peak
    assert metrics.bytes["main_weights"] == metrics.bytes["main_grads"] > 0
