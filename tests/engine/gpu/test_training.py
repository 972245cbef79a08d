"""Training on a GPU equals plain PyTorch, with any overlap of streams."""

from __future__ import annotations

import os
from contextlib import nullcontext
from itertools import product
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
    STEPS,
    TOLERANCE,
    max_error,
    single_rank_group,
    supports_two_ranks,
    train,
    train_reference,
)
from tests.engine.offload.training import (
    CPU,
    PARAM,
    SAMPLES,
    TrainResult,
    config,
    make_engine,
    offload_configs,
    run_steps,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.gpu
gpu_or_cpu = pytest.mark.gpu_or_cpu
SLEEP_CYCLES = 2_000_000  # about a millisecond: longer than any kernel or copy in these tests


@gpu_or_cpu
@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("nccl", [False, True], ids=["local", "nccl"])
def test_equals_plain_torch(
    nccl: bool, stage: int, precision: str, micro_steps: int, tmp_path: Path
) -> None:
    """With every offload too, in fp64 and bf16."""
    expected = train_reference(precision, micro_steps)
    offloads = offload_configs(tmp_path, stage) if precision in ("fp64", "bf16") else {"": {}}
    for name, offload in offloads.items():
        with single_rank_group(tmp_path / f"store {name}") if nccl else nullcontext():
            actual = train(config(stage, precision, micro_steps, **offload), precision)
        assert max_error(actual, expected, precision) <= TOLERANCE[precision], name


class Delay(torch.autograd.Function):
    """Identity that stalls the compute stream, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.cuda._sleep(SLEEP_CYCLES)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        torch.cuda._sleep(SLEEP_CYCLES)
        return grad.clone()


class DelayedBlock(nn.Module):
    """Its output is ready long after its kernels were enqueued."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + Delay.apply(self.down(Delay.apply(torch.tanh(self.up(x)))))


def train_delayed(stage: int, *, delayed: bool, **zero: Any) -> TrainResult:
    """Train with the compute stream behind all others if `delayed`."""
    torch.manual_seed(0)
    model = nn.Sequential(*(DelayedBlock() for _ in range(4)))
    document = config(stage, "bf16", 2, **zero)
    engine = rayzero.initialize(
        model=model, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), config=document
    )[0]
    sleep = torch.cuda._sleep
    torch.cuda._sleep = sleep if delayed else lambda cycles: None  # type: ignore[assignment]
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
def test_streams_are_synchronized(stage: int, tmp_path: Path) -> None:
    """Results are bit-identical with and without overlap, with and without delays."""
    cases: list[dict[str, Any]] = [{"overlap_comm": True}, CPU, CPU | {"overlap_comm": False}]
    cases += [PARAM, CPU | PARAM] if stage == 3 else []
    with single_rank_group(tmp_path / "store"):
        expected_losses, expected = train_delayed(stage, delayed=False, overlap_comm=False)
        for delayed, case in product((True, False), cases):
            losses, state = train_delayed(stage, delayed=delayed, **case)
            assert losses == expected_losses, (delayed, case)
            equal = [torch.equal(state[name], expected[name]) for name in state]
            assert all(equal), (delayed, case)


@gpu_or_cpu
@pytest.mark.parametrize("stage", [0, 3])
def test_overflow_only_halves_loss_scale(stage: int, tmp_path: Path) -> None:
    scaler = DynamicScaler(Fp16Config(initial_scale_power=8, loss_scale_window=2, hysteresis=1))
    document = config(stage, "fp16")
    document["fp16"]["loss_scale_window"] = 2
    with single_rank_group(tmp_path / "store"):
        engine = make_engine(document)
        for batch, overflow in zip(zoo.batches(6, SAMPLES), "..x..x", strict=True):
            before = engine.state_dict()
            tokens = batch.to(DEVICE)
            loss = engine(tokens[:, :-1], targets=tokens[:, 1:])["loss"]
            engine.backward(loss * float("inf") if overflow == "x" else loss)
            engine.step()
            scaler.update(overflow=overflow == "x")
            assert engine.loss_scale == scaler.value
            after = engine.state_dict()
            unchanged = all(torch.equal(after[name], before[name]) for name in after)
            assert unchanged is (overflow == "x")
        assert engine.skipped_steps == 2


@pytest.mark.parametrize("offload", [{}, CPU], ids=["device", "cpu"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_is_constant_after_third_step(
    stage: int, offload: dict[str, Any], tmp_path: Path
) -> None:
    with single_rank_group(tmp_path / "store"):
        engine = make_engine(config(stage, "bf16", 2, **offload))
        run_steps(engine, range(3))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run_steps(engine, range(3, 5))
        allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        run_steps(engine, range(5, 15))
        assert torch.cuda.memory_allocated() == allocated
        assert torch.cuda.max_memory_allocated() == peak
        engine.close()


@gpu_or_cpu
@pytest.mark.parametrize("offload", [{}, CPU | PARAM], ids=["device", "all on the cpu"])
def test_resume_from_checkpoint_is_bit_identical(offload: dict[str, Any], tmp_path: Path) -> None:
    with single_rank_group(tmp_path / "store"):
        engine = make_engine(config(3, "bf16", **offload))
        run_steps(engine, range(2))
        engine.save_checkpoint(tmp_path / "saved")
        run_steps(engine, range(2, 4))
        other = make_engine(config(3, "bf16", **offload), seed=9)
        other.load_checkpoint(tmp_path / "saved")
        run_steps(other, range(2, 4))
        expected, actual = engine.state_dict(), other.state_dict()
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


def train_on_nccl(rank: int, world: int, stage: int, precision: str, store: str) -> TrainResult:
    dist.destroy_process_group()  # replaces run_ranks' gloo group
    os.environ.update(NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_NVLS_ENABLE="0")
    os.environ["LOCAL_RANK"] = str(rank)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    file = dist.FileStore(store, world)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=file, rank=rank, world_size=world)
    return train(config(stage, precision), precision)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_equal_plain_torch(stage: int, precision: str, tmp_path: Path) -> None:
    if not supports_two_ranks():
        pytest.skip("one GPU, and NCCL is older than 2.30, which allows several ranks on it")
    store = str(tmp_path / "store")
    actual, _ = run_ranks(2, train_on_nccl, stage, precision, store, timeout_s=120.0)
    assert max_error(actual, train_reference(precision, 2), precision) <= TOLERANCE[precision]


def test_throughput_and_memory_metrics() -> None:
    engine = make_engine(config(0, "bf16"))
    run_steps(engine, range(STEPS))
    metrics = engine.metrics
    assert metrics.tokens_per_s is not None
    assert (metrics.mfu is None) == (metrics.flops_per_s is None)  # both need the GPU's peak FLOPS
    assert metrics.bytes["main_weights"] == metrics.bytes["main_grads"] > 0
