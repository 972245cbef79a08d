"""The model in full for a consumer on streams of its own, as vLLM's packed broadcast is: each batch
of tensors is pulled, packed and sent on another stream, and the host waits for none of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from rayzero.engine.device import Event, get_device
from tests.support.races.cases import Case
from tests.support.races.models import make_batch
from tests.support.races.running import build_engine
from tests.support.virtual_device.device import VirtualDevice
from tests.support.virtual_device.machine import Machine
from tests.support.virtual_device.nccl import Alone
from tests.support.virtual_device.placement import DEVICE
from tests.support.virtual_device.rank import virtual_cluster, virtual_rank

BATCH_NUMEL = 600


def send_all(engine: object) -> int:
    """Packs the parameters on two streams in turn. Returns how many batches there were."""
    device = get_device(DEVICE)
    streams = [device.new_stream(), device.new_stream()]
    packed = [torch.empty(0)] * 2
    params, sent, is_left = engine.iterate_params(), 0, True
    while is_left:
        streams[sent % 2].synchronize()
        packed[sent % 2] = torch.empty(0)
        with device.use_stream(streams[sent % 2]):
            batch: list[torch.Tensor] = []
            while is_left and sum(it.numel() for it in batch) <= BATCH_NUMEL:
                is_left = (pair := next(params, None)) is not None
                batch += [pair[1].reshape(-1)] if pair else []
            if batch:
                packed[sent % 2] = torch.cat(batch)
            sent += 1
    for stream in streams:
        stream.synchronize()
    return sent


def train_and_send(case: Case, **left_out: Any) -> Machine:
    """Trains and sends after each step; `left_out` replaces methods of the device meanwhile."""
    generator = torch.Generator().manual_seed(0)
    with virtual_cluster(Alone(0, case.world_size)), virtual_rank() as machine:
        engine = build_engine(case)
        for _ in range(3):
            batch = make_batch(case.model, generator).pin_memory().to(DEVICE, non_blocking=True)
            loss = engine(batch)
            engine.backward(getattr(loss, "loss", loss).float().mean())
            engine.step()
            with mock.patch.multiple(VirtualDevice, **left_out) if left_out else nullcontext():
                assert send_all(engine) > 3
        engine.close()
    return machine


CASES = [
    *(Case(stage=stage, micro_steps=1) for stage in range(4)),
    Case(stage=3, offload="both", micro_steps=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_reads_what_was_gathered(case: Case) -> None:
    machine = train_and_send(case)
    assert not machine.memory.races
    assert not machine.memory.early_frees


@pytest.mark.parametrize(
    ("left_out", "found"),
    [
        ({"record_use": lambda self, tensor: None}, "early_frees"),
        ({"synchronize": lambda self: None}, "races"),
        ({"record_event": lambda self: Event()}, "races"),
    ],
    ids=["record_use", "synchronize", "record_event"],
)
def test_without_one_of_its_waits_it_would_not(left_out: dict[str, Any], found: str) -> None:
    assert getattr(train_and_send(Case(stage=3, micro_steps=1), **left_out).memory, found)
