"""The link between a GPU and host memory copies the right bits, also when a stream is late.

Every test first lets the stream that the copy depends on stand still, so that a copy which does not
wait for it would take what was there before.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rayzero.engine.comm.backend import CompletedWork
from rayzero.engine.offload.transfer import CudaTransfer
from tests.engine.gpu.training import DEVICE

pytestmark = pytest.mark.gpu
NUMEL = 4096
SLEEP_CYCLES = 20_000_000  # about ten milliseconds


@pytest.fixture
def link() -> CudaTransfer:
    return CudaTransfer(torch.device("cuda", torch.cuda.current_device()))


def late(value: float) -> Tensor:
    """A tensor on the GPU that has this value only after a while; zero until then."""
    made = torch.zeros(NUMEL, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    return made.fill_(value)


def test_a_fetch_waits_for_what_was_enqueued_before_it(link: CudaTransfer) -> None:
    target = link.host_zeros(NUMEL, torch.float32)
    assert target.is_pinned()
    source = late(3.0)
    link.d2h(CompletedWork(), source, target, add=False, early=True)
    link.wait_d2h()
    assert torch.equal(target, torch.full((NUMEL,), 3.0))


def test_a_source_may_be_overwritten_after_its_release(link: CudaTransfer) -> None:
    target = link.host_zeros(1 << 24, torch.float32)  # 64 MiB: takes milliseconds to copy
    source = torch.full((1 << 24,), 1.0, device=DEVICE)
    fetched = link.d2h(CompletedWork(), source, target, add=False, early=True)
    fetched.release()
    source.fill_(2.0)
    link.wait_d2h()
    assert bool((target == 1.0).all())


@pytest.mark.parametrize("early", [True, False])
def test_fetches_add_up_in_order(link: CudaTransfer, early: bool) -> None:
    """More of them than there are staging buffers."""
    target = link.host_zeros(NUMEL, torch.float32).fill_(100.0)
    for number in range(1, 6):
        source = late(float(number))
        pending = link.d2h(CompletedWork(), source, target, add=True, early=early)
        pending.wait()
    link.wait_d2h()
    assert torch.equal(target, torch.full((NUMEL,), 115.0))
    assert link.staging_bytes <= 2 * 4 * NUMEL


def test_a_send_is_seen_after_join(link: CudaTransfer) -> None:
    source = link.host_zeros(NUMEL, torch.float32).fill_(5.0)
    target = torch.zeros(NUMEL, dtype=torch.bfloat16, device=DEVICE)
    with torch.cuda.stream(link._h2d_stream):
        torch.cuda._sleep(SLEEP_CYCLES)
    link.h2d(source, target)
    link.sync_compute()
    seen = target.clone()
    link.wait_h2d()
    source.fill_(6.0)
    assert bool((seen == 5.0).all())


def test_a_send_waits_for_readers_of_its_target(link: CudaTransfer) -> None:
    source = link.host_zeros(NUMEL, torch.float32).fill_(7.0)
    target = torch.full((NUMEL,), 1.0, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    read = target.clone()  # enqueued before the send, so it reads what was there
    link.h2d(source, target)
    link.sync_compute()
    assert bool((read == 1.0).all())
    assert bool((target == 7.0).all())


def test_copies_ahead_start_after_what_is_enqueued(link: CudaTransfer) -> None:
    host = link.host_zeros(NUMEL, torch.float32).fill_(9.0)
    slot = torch.full((NUMEL,), 1.0, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    read = slot.clone()
    with link.side_stream():
        slot.copy_(host, non_blocking=True)
    link.sync_compute()
    assert bool((read == 1.0).all())
    assert bool((slot == 9.0).all())
