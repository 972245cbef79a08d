"""The link between a GPU and host memory copies the right bits, also when a stream is late.

Every test first lets the stream that the copy depends on stand still, so that a copy which does not
wait for it would take what was there before.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rayzero.engine.comm.collectives import Done
from rayzero.engine.offload.link import Copy, CudaLink
from tests.engine.gpu.training import DEVICE

pytestmark = pytest.mark.gpu
NUMEL = 4096
SLEEP_CYCLES = 20_000_000  # about ten milliseconds


@pytest.fixture
def link() -> CudaLink:
    return CudaLink(torch.device("cuda", torch.cuda.current_device()))


def late(value: float) -> Tensor:
    """A tensor on the GPU that has this value only after a while; zero until then."""
    made = torch.zeros(NUMEL, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    return made.fill_(value)


def test_a_fetch_waits_for_what_was_enqueued_before_it(link: CudaLink) -> None:
    target = link.host(NUMEL, torch.float32)
    assert target.is_pinned()
    source = late(3.0)
    link.fetch(Done(), Copy(source, target, add=False, early=True))
    link.land()
    assert torch.equal(target, torch.full((NUMEL,), 3.0))


def test_a_source_may_be_overwritten_after_its_release(link: CudaLink) -> None:
    target = link.host(1 << 24, torch.float32)  # 64 MiB: takes milliseconds to copy
    source = torch.full((1 << 24,), 1.0, device=DEVICE)
    fetched = link.fetch(Done(), Copy(source, target, add=False, early=True))
    fetched.release()
    source.fill_(2.0)
    link.land()
    assert bool((target == 1.0).all())


@pytest.mark.parametrize("early", [True, False])
def test_fetches_add_up_in_order(link: CudaLink, early: bool) -> None:
    """More of them than there are staging buffers."""
    target = link.host(NUMEL, torch.float32).fill_(100.0)
    for number in range(1, 6):
        pending = link.fetch(Done(), Copy(late(float(number)), target, add=True, early=early))
        pending.wait()
    link.land()
    assert torch.equal(target, torch.full((NUMEL,), 115.0))
    assert link.staging_bytes <= 2 * 4 * NUMEL


def test_a_send_is_seen_after_join(link: CudaLink) -> None:
    source = link.host(NUMEL, torch.float32).fill_(5.0)
    target = torch.zeros(NUMEL, dtype=torch.bfloat16, device=DEVICE)
    with torch.cuda.stream(link._up):
        torch.cuda._sleep(SLEEP_CYCLES)
    link.send(source, target)
    link.join()
    seen = target.clone()
    link.sent()
    source.fill_(6.0)
    assert bool((seen == 5.0).all())


def test_a_send_waits_for_readers_of_its_target(link: CudaLink) -> None:
    source = link.host(NUMEL, torch.float32).fill_(7.0)
    target = torch.full((NUMEL,), 1.0, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    read = target.clone()  # enqueued before the send, so it reads what was there
    link.send(source, target)
    link.join()
    assert bool((read == 1.0).all())
    assert bool((target == 7.0).all())


def test_copies_ahead_start_after_what_is_enqueued(link: CudaLink) -> None:
    host = link.host(NUMEL, torch.float32).fill_(9.0)
    slot = torch.full((NUMEL,), 1.0, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    read = slot.clone()
    with link.ahead():
        slot.copy_(host, non_blocking=True)
    link.join()
    assert bool((read == 1.0).all())
    assert bool((slot == 9.0).all())
