"""What an update of offloaded state does beside the copies of other chunks; staging buffers.

The order of copies and of what reads them is tested by `tests/engine/races`: each wait, left out,
is a race there.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rayzero.engine.comm.backend import Work
from rayzero.engine.device import get_device
from rayzero.engine.offload import nvme_store
from rayzero.engine.offload.nvme_store import MappedFile, NvmeStore
from rayzero.engine.offload.stores import UpdateChunk
from rayzero.engine.offload.transfer import HostTransfer, StreamTransfer
from rayzero.engine.precision.policy import Precision


class AtOnce:
    """A pool whose tasks are over when they are submitted."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def submit(self, call: Any) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(call())
        return future

    def shutdown(self, **_: Any) -> None: ...


def test_gradients_that_are_added_share_two_staging_buffers() -> None:
    transfer, total = StreamTransfer(get_device(torch.device("cpu"))), torch.zeros(4)
    for number in range(5):
        transfer.d2h(Work(), torch.full((4,), float(number)), total, add=True, early=True)
    assert transfer.staging_bytes == 2 * total.nbytes
    assert total.tolist() == [0.0 + 1.0 + 2.0] * 4, "what had to make room is added by now"
    transfer.wait_d2h()
    assert total.tolist() == [0.0 + 1.0 + 2.0 + 3.0 + 4.0] * 4


def test_chunks_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With three buffers: while a chunk is updated, the next one is read, and the last written."""
    log: list[str] = []
    read, write = MappedFile.read, MappedFile.write

    def logged_read(file: MappedFile, stored: Tensor, into: Tensor) -> None:
        read(file, stored, into)
        log.append(f"read {int(into[0])}")

    def logged_write(file: MappedFile, stored: Tensor, source: Tensor) -> None:
        write(file, stored, source)
        log.append(f"write {int(source[0])}")

    monkeypatch.setattr(nvme_store, "ThreadPoolExecutor", AtOnce)
    transfer = HostTransfer(separate_memory=True)
    store = NvmeStore(Precision(), transfer, MappedFile(tmp_path), 3, 4, separate_memory=True)
    values = [torch.full((4,), float(number)) for number in range(4)]
    mains = [store.main_weights(value, value) for value in values]
    monkeypatch.setattr(MappedFile, "read", logged_read)
    monkeypatch.setattr(MappedFile, "write", logged_write)
    chunks = [UpdateChunk(main, (main,), (torch.zeros(4),)) for main in mains]
    log.extend(f"update {index}" for index in store.update_chunks(chunks, {}))
    store.close()
    assert log == [
        "read 0",
        "read 1",
        "update 0",
        "write 0",
        "read 2",
        "update 1",
        "write 1",
        "read 3",
        "update 2",
        "write 2",
        "update 3",
        "write 3",
    ]
    assert all(
        torch.equal(chunk.targets[0], value) for chunk, value in zip(chunks, values, strict=True)
    )
