"""Loading into a device's memory by copies that run late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rayzero.engine.device import replace_device
from rayzero.engine.errors import DataError
from rayzero.engine.layout.state_index import BlockIndex, LogicalTensor, StateSource, TensorRange
from rayzero.engine.state import ranges
from rayzero.engine.state.ranges import read_ranges, whole_tensor_range
from tests.workers.late_device import LateDevice, LateEvent

NUMEL = 100


class Source(StateSource):
    """Two blocks of int32: the first in registered memory, the second elsewhere."""

    step = 1

    def __init__(self, device: LateDevice, *, damaged: bool = False) -> None:
        tensor = LogicalTensor("I32", (2 * NUMEL,))
        self.block_indexes = [
            BlockIndex({"w": tensor}, (TensorRange("w", i * NUMEL, (i + 1) * NUMEL, 0),), 4 * NUMEL)
            for i in (0, 1)
        ]
        self.data = torch.arange(2 * NUMEL, dtype=torch.int32).view(2, NUMEL)
        self.device, self.damaged = device, damaged
        self.queued_at_verify: int | None = None

    def metadata(self, rank: int) -> dict[str, Any]:
        return {}

    def bytes(self, block: int) -> memoryview:
        return self.data[block].view(torch.uint8).numpy().data

    def read(self, block: int, offset: int, into: memoryview) -> None:
        assert block == 1
        into[:] = self.bytes(block)[offset : offset + len(into)]

    def registered_block(self, block: int) -> memoryview | None:
        return None if block else self.bytes(block)

    def verify(self, block: int) -> None:
        self.queued_at_verify = len(self.device.streams[0].queue)
        if self.damaged:
            raise DataError("damaged")

    def close(self) -> None:
        self.data.fill_(-1)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    monkeypatch.setattr(ranges, "STAGING_BYTES", 16)
    device = LateDevice()
    with replace_device(device):
        yield device


def read(source: Source, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    target = torch.zeros(2 * NUMEL, dtype=dtype)
    try:
        read_ranges([whole_tensor_range("w", target)], source)
    finally:
        source.close()
        source.device.run()
    return target


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_state_is_complete_before_its_source_is_closed(device: LateDevice, dtype: torch.dtype):
    source = Source(device)
    assert read(source, dtype).tolist() == [*range(2 * NUMEL)]
    assert source.queued_at_verify, "verified beside the copies"


def test_damaged_block_is_an_error_and_leaves_no_copy_behind(device: LateDevice):
    source = Source(device, damaged=True)
    with pytest.raises(DataError, match="damaged"):
        read(source)
    assert not device.streams[0].queue


def test_staging_that_is_filled_too_early_is_detected(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(LateEvent, "synchronize", lambda self: None)
    assert read(Source(device)).tolist() != [*range(2 * NUMEL)]
