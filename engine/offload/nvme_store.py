"""Optimizer state and main weights in a file: a few buffers of them are in memory at a time.

An update goes through the pieces in a fixed order. While one is updated, a thread reads the next
ones and writes the last ones back.

Order and lifetime. Buffers take turns: piece i is always in buffer i mod k. A buffer is read into
when the write of its last piece is over and its weights have arrived on the device. Pieces lie at
different places of the file, so reads and writes need no order among them. An update ends when
everything is written: at rest nothing is in the buffers, and the file is the state.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rayzero.engine.errors import EngineError
from rayzero.engine.offload.mapped_file import MappedFile
from rayzero.engine.offload.stores import HostStore, OptimizerStateMap, UpdateChunk
from rayzero.engine.offload.transfer import HostTransfer, MemoryKind
from rayzero.engine.precision.policy import Precision

IO_LIMIT_S = 600.0  # for one piece: a disk that takes longer is not there any more


_IO_THREADS = 2  # a read and a write side by side


@dataclass
class _ChunkBuffer:
    """Memory for one piece: a flat tensor for each kind of state.

    Attributes:
        busy: the read or write that uses it.
        bound: what lies in it: (weight, key, what rests in the file, the part of the buffer); key
            None is the weight itself.
    """

    memory: dict[tuple[str | None, torch.dtype], Tensor] = field(default_factory=dict)
    pending_io: Future[None] | None = None
    attached: list[tuple[Tensor, str | None, Tensor, Tensor]] = field(default_factory=list)

    def wait(self) -> None:
        """Returns when the read or write is over.

        Raises:
            EngineError: it failed, or took too long.
        """
        busy, self.pending_io = self.pending_io, None
        if busy is None:
            return
        try:
            busy.result(IO_LIMIT_S)
        except LateError:
            raise EngineError(
                f"the disk has not answered for {IO_LIMIT_S:g} s",
                fix="zero_optimization.offload_optimizer.nvme_path",
            ) from None

    def chunk_slice(self, key: str | None, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        return self.memory[key, dtype][start:stop]


class NvmeStore(HostStore):
    """State in a file, gradients in host memory.

    Args:
        folder: where the file is made.
        buffers: how many pieces may be in memory at a time.
        piece_numel: the most elements of a piece.
    """

    memory_kind = MemoryKind.DISK

    def __init__(
        self,
        precision: Precision,
        link: HostTransfer,
        rest: MemoryKind,
        folder: Path,
        buffers: int,
        piece_numel: int,
    ) -> None:
        super().__init__(precision, link, rest)
        self.chunk_numel = piece_numel
        self._file = MappedFile(folder)
        self._buffers = [_ChunkBuffer() for _ in range(buffers)]
        # Read ahead as far as leaves one buffer for what is updated and one for what is written.
        self._read_ahead = max(min(buffers - 1, 1), buffers - 2)
        self._io_pool = ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="rayzero-disk")

    @property
    def staging_bytes(self) -> int:
        return sum(one.nbytes for buffer in self._buffers for one in buffer.memory.values())

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        main = self._precision.main_weights(original, model_weights)
        if main is model_weights and not self._separate_memory:  # they are in host memory anyway
            return main
        resting = self._file.new_tensor(main.numel(), main.dtype)
        self._write([(resting, main.cpu())])
        return resting

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._file.new_tensor(numel, dtype)

    def update_chunks(
        self, pieces: Sequence[UpdateChunk], state: OptimizerStateMap
    ) -> Iterator[int]:
        longest = max((piece.numel for piece in pieces), default=0)
        begun = 0
        try:
            for number, piece in enumerate(pieces):
                while begun < min(number + 1 + self._read_ahead, len(pieces)):
                    self._start_read(self._buffer_for(begun), pieces[begun], state, longest)
                    begun += 1
                buffer = self._buffer_for(number)
                buffer.wait()
                _attach(buffer, state)
                yield number
                current = [weight.detach() for weight in piece.weights]
                writes, made = _detach(buffer, state), self._spill_new_state(piece, state)
                self._send_updated(piece, current)
                buffer.pending_io = self._io_pool.submit(self._write, writes + made)
                if made:  # its first update
                    del made, writes
                    _trim_heap()
        finally:
            self._wait_all(state)

    def close(self) -> None:
        self._io_pool.shutdown(wait=False, cancel_futures=True)
        self._file.close()

    def _buffer_for(self, number: int) -> _ChunkBuffer:
        return self._buffers[number % len(self._buffers)]

    def _start_read(
        self, buffer: _ChunkBuffer, piece: UpdateChunk, state: OptimizerStateMap, longest: int
    ) -> None:
        """Starts to read a piece, as soon as the buffer is free."""
        buffer.wait()
        self._transfer.wait_h2d()
        at = 0
        buffer.attached.clear()
        for weight in piece.weights:
            start, at = at, at + weight.numel()
            resting: dict[str | None, Tensor] = {None: weight.detach()}
            resting |= {
                key: one
                for key, one in state.get(weight, {}).items()
                if _is_per_element(one, weight)
            }
            for key, one in resting.items():
                if self._file.offset_of(one) is not None:
                    if (key, one.dtype) not in buffer.memory:
                        buffer.memory[key, one.dtype] = self._transfer.host_zeros(
                            longest, one.dtype
                        )
                    part = buffer.chunk_slice(key, one.dtype, start, at)
                    buffer.attached.append((weight, key, one, part))
        reads = [(one, part) for _, _, one, part in buffer.attached]
        buffer.pending_io = self._io_pool.submit(self._read, reads)

    def _spill_new_state(
        self, piece: UpdateChunk, state: OptimizerStateMap
    ) -> list[tuple[Tensor, Tensor]]:
        """State that the optimizer has made in memory gets its place in the file."""
        writes = []
        for weight in piece.weights:
            for key, one in list(state.get(weight, {}).items()):
                if _is_per_element(one, weight) and self._file.offset_of(one) is None:
                    resting = self._file.new_tensor(one.numel(), one.dtype)
                    state[weight][key] = resting
                    writes.append((resting, one))
        return writes

    def _wait_all(self, state: OptimizerStateMap) -> None:
        """Everything is written, also when the update broke off; the first failure is told."""
        failure: EngineError | None = None
        for buffer in self._buffers:
            try:
                buffer.wait()
            except EngineError as error:
                failure = failure or error
            _detach(buffer, state)
        self._transfer.wait_h2d()
        if failure is not None:
            raise failure

    def _read(self, reads: Sequence[tuple[Tensor, Tensor]]) -> None:
        for resting, part in reads:
            self._file.read(self._file_offset(resting), part)

    def _write(self, writes: Sequence[tuple[Tensor, Tensor]]) -> None:
        for resting, value in writes:
            self._file.write(self._file_offset(resting), value)

    def _file_offset(self, resting: Tensor) -> int:
        offset = self._file.offset_of(resting)
        if offset is None:
            raise RuntimeError("a tensor outside the file was to rest there")
        return offset


def _trim_heap() -> None:
    """Gives freed memory back to the system, where the C library can.

    glibc does not use again what posix_memalign(3) had: without this the heap would grow by every
    piece of state that an optimizer makes, although each is freed.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _attach(buffer: _ChunkBuffer, state: OptimizerStateMap) -> None:
    """The optimizer's tensors are those in memory from now on."""
    for weight, key, _, part in buffer.attached:
        if key is None:
            weight.data = part
        else:
            state[weight][key] = part


def _detach(buffer: _ChunkBuffer, state: OptimizerStateMap) -> list[tuple[Tensor, Tensor]]:
    """The optimizer's tensors are those in the file again; what is to be written there."""
    writes = []
    for weight, key, resting, _ in buffer.attached:
        if key is None:
            writes.append((resting, weight.detach()))
            weight.data = resting
        else:
            writes.append((resting, state[weight][key]))
            state[weight][key] = resting
    buffer.attached.clear()
    return writes


def _is_per_element(value: object, weight: Tensor) -> bool:
    """State with an element for each of the weight's."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == weight.shape
