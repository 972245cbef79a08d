"""Optimizer state and main weights in a file, with a few buffers of them in memory at a time.

An update processes chunks in a fixed order. While one is updated, threads read the next ones and
write the previous ones back.

Order and lifetime. Chunk i always uses buffer i mod k. A buffer is read into after the write of its
previous chunk has ended and the events behind the copies of its weights to the device, in the next
update, too; later chunks' copies are not waited for. Chunks have disjoint file
ranges, so reads and writes need no order among them. An update ends when everything is written:
between updates the buffers are empty, and the file is the state.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rayzero.engine.device import Event
from rayzero.engine.errors import EngineError
from rayzero.engine.offload.mapped_file import MappedFile
from rayzero.engine.offload.stores import HostStore, OptimizerStateMap, UpdateChunk
from rayzero.engine.offload.transfer import HostTransfer, MemoryKind
from rayzero.engine.precision.policy import Precision

IO_LIMIT_S = 600.0  # for one chunk: a disk that takes longer has failed
_IO_THREADS = 2  # a read and a write side by side


@dataclass
class _Attached:
    """A weight (key empty) or one tensor of its state, in the file and in a buffer."""

    weight: Tensor
    key: str
    stored: Tensor
    buffered: Tensor


@dataclass
class _ChunkBuffer:
    """Memory for one chunk: a flat tensor for each kind of state.

    Attributes:
        pending_io: the read or write that uses it.
        sent: behind the copies to the device that read it.
        attached: its content.
    """

    memory: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)
    pending_io: Future[None] | None = None
    sent: list[Event] = field(default_factory=list)
    attached: list[_Attached] = field(default_factory=list)

    def wait(self) -> None:
        """Returns when the read or write is over. Raises EngineError if it failed, or took too
        long."""
        pending, self.pending_io = self.pending_io, None
        if pending is None:
            return
        try:
            pending.result(IO_LIMIT_S)
        except LateError:
            raise EngineError(
                f"the disk has not answered for {IO_LIMIT_S:g} s",
                fix="zero_optimization.offload_optimizer.nvme_path",
            ) from None

    def attach(self, state: OptimizerStateMap) -> None:
        """Points the optimizer's tensors to the buffer."""
        for entry in self.attached:
            if entry.key:
                state[entry.weight][entry.key] = entry.buffered
            else:
                entry.weight.data = entry.buffered

    def detach(self, state: OptimizerStateMap) -> list[tuple[Tensor, Tensor]]:
        """Points the optimizer's tensors to the file again; returns what must be written, as
        (tensor in the file, values)."""
        writes = []
        for entry in self.attached:
            if entry.key:
                writes.append((entry.stored, state[entry.weight][entry.key]))
                state[entry.weight][entry.key] = entry.stored
            else:
                writes.append((entry.stored, entry.weight.detach()))
                entry.weight.data = entry.stored
        self.attached.clear()
        return writes


class NvmeStore(HostStore):
    """State in a file, gradients in host memory.

    Args:
        file: closed with the store.
        buffers: chunks in memory at a time.
        chunk_numel: the most elements of a chunk.
    """

    memory_kind = MemoryKind.DISK

    def __init__(
        self,
        precision: Precision,
        transfer: HostTransfer,
        file: MappedFile,
        buffers: int,
        chunk_numel: int,
        *,
        separate_memory: bool,
    ) -> None:
        super().__init__(precision, transfer, separate_memory=separate_memory)
        self.chunk_numel = chunk_numel
        self._file = file
        self._buffers = [_ChunkBuffer() for _ in range(buffers)]
        # Leaves one buffer for the chunk being updated and one for the chunk being written.
        self._read_ahead = max(min(buffers - 1, 1), buffers - 2)
        self._io_pool = ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="rayzero-disk")

    @property
    def staging_bytes(self) -> int:
        return sum(part.nbytes for buffer in self._buffers for part in buffer.memory.values())

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        main = self._precision.main_weights(original, model_weights)
        if main is model_weights and not self._separate_memory:  # they are in host memory
            return main
        stored = self._file.new_tensor(main.numel(), main.dtype)
        self._file.write(stored, main.to(stored.device))
        return stored

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._file.new_tensor(numel, dtype)

    def update_chunks(
        self, chunks: Sequence[UpdateChunk], state: OptimizerStateMap
    ) -> Iterator[int]:
        max_numel = max((chunk.numel for chunk in chunks), default=0)
        started = 0
        try:
            for index, chunk in enumerate(chunks):
                while started < min(index + 1 + self._read_ahead, len(chunks)):
                    self._start_read(self._buffer_for(started), chunks[started], state, max_numel)
                    started += 1
                buffer = self._buffer_for(index)
                buffer.wait()
                buffer.attach(state)
                yield index
                current = [weight.detach() for weight in chunk.weights]
                writes, new_state = buffer.detach(state), self._spill_new_state(chunk, state)
                buffer.sent = self._send_updated(chunk, current)
                buffer.pending_io = self._io_pool.submit(self._write, writes + new_state)
                if new_state:  # its first update
                    del new_state, writes
                    _trim_heap()
        finally:
            self._wait_all(state)

    def close(self) -> None:
        self._io_pool.shutdown(wait=False, cancel_futures=True)
        self._file.close()

    def _buffer_for(self, index: int) -> _ChunkBuffer:
        return self._buffers[index % len(self._buffers)]

    def _start_read(
        self, buffer: _ChunkBuffer, chunk: UpdateChunk, state: OptimizerStateMap, max_numel: int
    ) -> None:
        """Starts to read a chunk, as soon as the buffer is free."""
        buffer.wait()
        for event in buffer.sent:
            event.synchronize()
        stop = 0
        buffer.attached.clear()
        for weight in chunk.weights:
            start, stop = stop, stop + weight.numel()
            values = {"": weight.detach()} | _per_element_state(weight, state)
            for key, stored in values.items():
                if stored in self._file:
                    kind = key, stored.dtype
                    if kind not in buffer.memory:
                        buffer.memory[kind] = self._transfer.host_zeros(max_numel, stored.dtype)
                    part = buffer.memory[kind][start:stop]
                    buffer.attached.append(_Attached(weight, key, stored, part))
        reads = [(entry.stored, entry.buffered) for entry in buffer.attached]
        buffer.pending_io = self._io_pool.submit(self._read, reads)

    def _spill_new_state(
        self, chunk: UpdateChunk, state: OptimizerStateMap
    ) -> list[tuple[Tensor, Tensor]]:
        """Allocates file space for state that the optimizer has created in memory."""
        writes = []
        for weight in chunk.weights:
            for key, value in _per_element_state(weight, state).items():
                if value not in self._file:
                    stored = self._file.new_tensor(value.numel(), value.dtype)
                    state[weight][key] = stored
                    writes.append((stored, value))
        return writes

    def _wait_all(self, state: OptimizerStateMap) -> None:
        """Waits for all I/O, also after a failed update; raises the first failure."""
        failure: EngineError | None = None
        for buffer in self._buffers:
            try:
                buffer.wait()
            except EngineError as error:
                failure = failure or error
            buffer.detach(state)
        if failure is not None:
            raise failure

    def _read(self, reads: Sequence[tuple[Tensor, Tensor]]) -> None:
        for stored, part in reads:
            self._file.read(stored, part)

    def _write(self, writes: Sequence[tuple[Tensor, Tensor]]) -> None:
        for stored, value in writes:
            self._file.write(stored, value)


def _trim_heap() -> None:
    """Returns freed memory to the system, if the C library can.

    glibc does not reuse freed memory of posix_memalign(3): without this the heap would grow with
    every chunk of state that an optimizer creates.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _per_element_state(weight: Tensor, state: OptimizerStateMap) -> dict[str, Tensor]:
    """A weight's state with one element per element of the weight, by key."""
    return {
        key: value
        for key, value in state.get(weight, {}).items()
        if isinstance(value, Tensor) and value.ndim > 0 and value.shape == weight.shape
    }
