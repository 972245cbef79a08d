"""Transfers between GPU and host memory are ordered with the compute stream.

Every test first stalls the stream that the copy depends on, so that a copy that does not
synchronize with it reads stale data.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rayzero.engine.comm.backend import ChainableWork
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.comm.process_group import SingleRankBackend
from rayzero.engine.device import get_device
from rayzero.engine.offload.transfer import StreamTransfer
from tests.engine.gpu.training import DEVICE

pytestmark = pytest.mark.gpu
NUMEL = 4096
SLEEP_CYCLES = 20_000_000  # about ten milliseconds


@pytest.fixture
def transfer() -> StreamTransfer:
    return StreamTransfer(get_device(torch.device("cuda", torch.cuda.current_device())))


def delayed_fill(value: float) -> Tensor:
    """A GPU tensor of zeros, filled with `value` by a kernel that runs delayed_fill."""
    tensor = torch.zeros(NUMEL, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    return tensor.fill_(value)


def reduced(source: Tensor) -> ChainableWork:
    """The sum over the only rank: it is complete with what was enqueued before."""
    return Collectives(SingleRankBackend()).all_reduce(source)


def test_d2h_waits_for_compute_stream(transfer: StreamTransfer) -> None:
    target = transfer.host_zeros(NUMEL, torch.float32)
    assert target.is_pinned()
    source = delayed_fill(3.0)
    transfer.d2h(reduced(source), source, target, add=False, early=True)
    transfer.wait_d2h()
    assert torch.equal(target, torch.full((NUMEL,), 3.0))


def test_d2h_source_is_reusable_after_release(transfer: StreamTransfer) -> None:
    target = transfer.host_zeros(1 << 24, torch.float32)  # 64 MiB: takes milliseconds to copy
    source = torch.full((1 << 24,), 1.0, device=DEVICE)
    pending = transfer.d2h(reduced(source), source, target, add=False, early=True)
    pending.release()
    source.fill_(2.0)
    transfer.wait_d2h()
    assert bool((target == 1.0).all())


@pytest.mark.parametrize("early", [True, False])
def test_d2h_accumulates_in_order(transfer: StreamTransfer, early: bool) -> None:
    """More copies than staging buffers."""
    target = transfer.host_zeros(NUMEL, torch.float32).fill_(100.0)
    for number in range(1, 6):
        source = delayed_fill(float(number))
        pending = transfer.d2h(reduced(source), source, target, add=True, early=early)
        pending.wait()
    transfer.wait_d2h()
    assert torch.equal(target, torch.full((NUMEL,), 115.0))
    assert transfer.staging_bytes <= 2 * 4 * NUMEL


def test_h2d_is_visible_after_sync_compute(transfer: StreamTransfer) -> None:
    source = transfer.host_zeros(NUMEL, torch.float32).fill_(5.0)
    target = torch.zeros(NUMEL, dtype=torch.bfloat16, device=DEVICE)
    with transfer._device.use_stream(transfer._h2d_stream):
        torch.cuda._sleep(SLEEP_CYCLES)
    transfer.h2d(source, target)
    transfer.sync_compute()
    result = target.clone()
    transfer.wait_h2d()
    source.fill_(6.0)
    assert bool((result == 5.0).all())


def test_h2d_waits_for_readers_of_target(transfer: StreamTransfer) -> None:
    source = transfer.host_zeros(NUMEL, torch.float32).fill_(7.0)
    target = torch.full((NUMEL,), 1.0, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    before = target.clone()  # enqueued before the copy, so it reads the old values
    transfer.h2d(source, target)
    transfer.sync_compute()
    assert bool((before == 1.0).all())
    assert bool((target == 7.0).all())


def test_side_stream_waits_for_compute_stream(transfer: StreamTransfer) -> None:
    host = transfer.host_zeros(NUMEL, torch.float32).fill_(9.0)
    slot = torch.full((NUMEL,), 1.0, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    before = slot.clone()
    with transfer.side_stream():
        slot.copy_(host, non_blocking=True)
    transfer.sync_compute()
    assert bool((before == 1.0).all())
    assert bool((slot == 9.0).all())
