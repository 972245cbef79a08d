"""Tensors in files: model weights between uses, main weights and optimizer state.

The file of a `MappedFile` has no name, so it disappears when its process ends, in whatever way. Its
tensors are mapped, so that all code that saves or loads state finds them as ordinary memory, in
pages that the kernel may evict at any time. Updates instead read and write with pread(2) and
pwrite(2): a failed call is an error, where a failed access to mapped memory is a signal. Both see
the same pages.

`NvmeStore` has a few buffers in memory. An update processes chunks in a fixed order. While a chunk
is updated, threads read the next chunks and write the previous ones back.

Order and lifetime. Chunk i always uses one of the k buffers, number i mod k. A chunk is read into a
buffer only after the buffer's previous chunk was written to the file, and after the events behind
the copies of that chunk's weights to the device; also if that was in the previous update. Copies of
other chunks are not waited for. Chunks have disjoint file ranges, so reads and writes need no order
among them. An update ends when everything is written: between updates the buffers are empty, and
the file is the state.

Rule of ordering: `update-chunks` (docs/engine.md).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rayzero.engine.device import Event
from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.offload.stores import HostStore, OptimizerStateMap, UpdateChunk
from rayzero.engine.offload.transfer import HostTransfer, MemoryKind
from rayzero.engine.precision.policy import Precision
from rayzero.engine.tensor_tree import storage_id

IO_LIMIT_S = 600.0  # for one chunk: a disk that takes longer has failed
_IO_THREADS = 2  # a read and a write at the same time


class MappedFile:
    """Owns one unnamed file in a folder, which is created if it is missing. The file lives as long
    as this object or a tensor in the file. The constructor raises ConfigError if no file can be
    created there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed in `close`
        except OSError as error:
            raise ConfigError(
                f"offload to {str(folder)!r}: {error.strerror}",
                allowed="a folder on a local disk that every worker may write to",
                fix="zero_optimization.offload_optimizer.nvme_path, or offload_param.nvme_path",
            ) from None
        self._size_bytes = 0
        self._offsets: dict[int, int] = {}  # in bytes, by the address of the storage

    def new_tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a mapped flat tensor of zeros. Its disk space is allocated at once. Raises
        EngineError if the disk is full."""
        size = -(-max(1, numel * dtype.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:  # allocated here: a page that cannot be written back later would kill the process
            os.posix_fallocate(self._file.fileno(), self._size_bytes, size)
            memory = mmap.mmap(self._file.fileno(), size, offset=self._size_bytes)
        except OSError as error:
            raise self._io_error(
                f"{size} bytes after {self._size_bytes} could not be allocated", error
            ) from None
        tensor = torch.frombuffer(memory, dtype=dtype, count=numel)
        self._offsets[tensor.untyped_storage().data_ptr()] = self._size_bytes
        self._size_bytes += size
        return tensor

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._offsets

    def read(self, stored: Tensor, into: Tensor) -> None:
        """Copies a tensor in the file to a contiguous tensor in host memory. Raises EngineError if
        the disk failed."""
        self._copy(os.preadv, "a read failed", stored, into)

    def write(self, stored: Tensor, source: Tensor) -> None:
        """Copies a contiguous tensor in host memory to a tensor in the file. Raises EngineError if
        the disk is full, or failed."""
        self._copy(os.pwritev, "a write failed", stored, source)

    def _copy(
        self,
        call: Callable[[int, list[memoryview], int], int],
        failure: str,
        stored: Tensor,
        memory: Tensor,
    ) -> None:
        start = self._offsets[stored.untyped_storage().data_ptr()]
        offset = start + int(stored.storage_offset()) * stored.element_size()
        flat = memory.detach().view(torch.uint8)
        remaining = flat.numpy().data.cast("B") if flat.numel() else memoryview(b"")
        while remaining.nbytes:
            try:
                count = call(self._file.fileno(), [remaining], offset)
            except OSError as error:
                raise self._io_error(failure, error) from None
            if not count:
                raise self._io_error(f"the file ends at {offset} of {self._size_bytes} bytes", None)
            remaining, offset = remaining[count:], offset + count

    def close(self) -> None:
        """Closes the descriptor. The disk space is freed with the last tensor in the file."""
        self._file.close()

    def _io_error(self, what: str, error: OSError | None) -> EngineError:
        reason = f": {error.strerror}" if error is not None else ""
        return EngineError(
            f"offloaded state in {str(self._folder)!r}: {what}{reason}",
            fix="zero_optimization.offload_optimizer.nvme_path: a working disk with free space "
            "(the files have no name: df shows them, ls does not), or offload_optimizer.device",
        )


class MetaFile(MappedFile):
    """The file of a memory plan: its tensors are on the meta device, and have only sizes."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}  # by the storage's identity

    def new_tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(numel, dtype=dtype, device="meta")
        self._tensors[storage_id(tensor)] = tensor
        return tensor

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._tensors

    def _copy(self, *_: object) -> None:
        return

    def close(self) -> None:
        return


@dataclass
class _Attached:
    """A weight (`key` is empty) or a tensor of its optimizer state: in the file (`stored`) and in a
    buffer (`buffered`)."""

    weight: Tensor
    key: str
    stored: Tensor
    buffered: Tensor


@dataclass
class _ChunkBuffer:
    """Memory for one chunk: a flat tensor for each kind of state.

    Attributes:
        pending_io: the read or write that uses the memory.
        sent: events behind the copies to the device that read the memory.
        attached: the tensors in the memory.
    """

    memory: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)
    pending_io: Future[None] | None = None
    sent: list[Event] = field(default_factory=list)
    attached: list[_Attached] = field(default_factory=list)

    def wait(self) -> None:
        """Waits for the pending read or write. Raises EngineError if it failed or took too long."""
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
        """Points the optimizer's tensors to the file again. Returns the pairs (tensor in the file,
        new values) that must be written."""
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
        file: file of the state, which the store closes.
        buffers: number of chunks in memory at a time.
        chunk_numel: the maximum number of elements of a chunk.
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
        if main is model_weights and not self._separate_memory:  # both are in host memory
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
                buffer.pending_io = self._submit(self._file.write, writes + new_state)
                if new_state:  # the chunk's first update
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
        """Starts to read a chunk into the buffer, once the buffer is free."""
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
        buffer.pending_io = self._submit(self._file.read, reads)

    def _submit(
        self, copy: Callable[[Tensor, Tensor], None], pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> Future[None]:
        """Makes a thread call `copy` with each pair (tensor in the file, tensor in memory)."""

        def run() -> None:
            for stored, part in pairs:
                copy(stored, part)

        return self._io_pool.submit(run)

    def _spill_new_state(
        self, chunk: UpdateChunk, state: OptimizerStateMap
    ) -> list[tuple[Tensor, Tensor]]:
        """Allocates file space for state that the optimizer has created in memory. Returns the
        pairs (tensor in the file, values) that must be written."""
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


def _trim_heap() -> None:
    """Returns freed memory to the system, if the C library can.

    glibc does not reuse freed memory of posix_memalign(3): without this the heap would grow with
    every chunk of state that an optimizer creates.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _per_element_state(weight: Tensor, state: OptimizerStateMap) -> dict[str, Tensor]:
    """Returns, by key, a weight's state that has one element per element of the weight."""
    return {
        key: value
        for key, value in state.get(weight, {}).items()
        if isinstance(value, Tensor) and value.ndim > 0 and value.shape == weight.shape
    }
