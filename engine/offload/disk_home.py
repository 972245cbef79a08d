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
from rayzero.engine.offload.home import HostHome, Piece, State
from rayzero.engine.offload.link import Link
from rayzero.engine.offload.place import Place
from rayzero.engine.offload.volume import Volume
from rayzero.engine.precision.policy import Precision

IO_LIMIT_S = 600.0  # for one piece: a disk that takes longer is not there any more
_THREADS = 2  # a read and a write side by side


@dataclass
class _Buffer:
    """Memory for one piece: a flat tensor for each kind of state.

    Attributes:
        busy: the read or write that uses it.
        bound: what lies in it: (weight, key, what rests in the file, the part of the buffer); key
            None is the weight itself.
    """

    memory: dict[tuple[str | None, torch.dtype], Tensor] = field(default_factory=dict)
    busy: Future[None] | None = None
    bound: list[tuple[Tensor, str | None, Tensor, Tensor]] = field(default_factory=list)

    def wait(self) -> None:
        """Returns when the read or write is over.

        Raises:
            EngineError: it failed, or took too long.
        """
        busy, self.busy = self.busy, None
        if busy is None:
            return
        try:
            busy.result(IO_LIMIT_S)
        except LateError:
            raise EngineError(
                f"the disk has not answered for {IO_LIMIT_S:g} s",
                fix="zero_optimization.offload_optimizer.nvme_path",
            ) from None

    def part(self, key: str | None, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        return self.memory[key, dtype][start:stop]


class DiskHome(HostHome):
    """State in a file, gradients in host memory.

    Args:
        folder: where the file is made.
        buffers: how many pieces may be in memory at a time.
        piece_numel: the most elements of a piece.
    """

    place = Place.DISK

    def __init__(
        self,
        precision: Precision,
        link: Link,
        rest: Place,
        folder: Path,
        buffers: int,
        piece_numel: int,
    ) -> None:
        super().__init__(precision, link, rest)
        self.piece_numel = piece_numel
        self._volume = Volume(folder)
        self._buffers = [_Buffer() for _ in range(buffers)]
        # Read ahead as far as leaves one buffer for what is updated and one for what is written.
        self._ahead = max(min(buffers - 1, 1), buffers - 2)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="rayzero-disk")

    @property
    def staging_bytes(self) -> int:
        return sum(one.nbytes for buffer in self._buffers for one in buffer.memory.values())

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        main = self._precision.main_weights(original, model_weights)
        if main is model_weights and not self._across:  # they are in host memory anyway
            return main
        resting = self._volume.tensor(main.numel(), main.dtype)
        self._write([(resting, main.cpu())])
        return resting

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._volume.tensor(numel, dtype)

    def rounds(self, pieces: Sequence[Piece], state: State) -> Iterator[int]:
        longest = max((piece.numel for piece in pieces), default=0)
        begun = 0
        try:
            for number, piece in enumerate(pieces):
                while begun < min(number + 1 + self._ahead, len(pieces)):
                    self._begin(self._turn(begun), pieces[begun], state, longest)
                    begun += 1
                buffer = self._turn(number)
                buffer.wait()
                _bind(buffer, state)
                yield number
                current = [weight.detach() for weight in piece.weights]
                writes, made = _unbind(buffer, state), self._made(piece, state)
                self._follow(piece, current)
                buffer.busy = self._threads.submit(self._write, writes + made)
                if made:  # its first update
                    del made, writes
                    _trim()
        finally:
            self._finish(state)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._volume.close()

    def _turn(self, number: int) -> _Buffer:
        return self._buffers[number % len(self._buffers)]

    def _begin(self, buffer: _Buffer, piece: Piece, state: State, longest: int) -> None:
        """Starts to read a piece, as soon as the buffer is free."""
        buffer.wait()
        self._link.sent()
        at = 0
        buffer.bound.clear()
        for weight in piece.weights:
            start, at = at, at + weight.numel()
            resting: dict[str | None, Tensor] = {None: weight.detach()}
            resting |= {
                key: one for key, one in state.get(weight, {}).items() if _alike(one, weight)
            }
            for key, one in resting.items():
                if self._volume.locate(one) is not None:
                    if (key, one.dtype) not in buffer.memory:
                        buffer.memory[key, one.dtype] = self._link.host(longest, one.dtype)
                    part = buffer.part(key, one.dtype, start, at)
                    buffer.bound.append((weight, key, one, part))
        reads = [(one, part) for _, _, one, part in buffer.bound]
        buffer.busy = self._threads.submit(self._read, reads)

    def _made(self, piece: Piece, state: State) -> list[tuple[Tensor, Tensor]]:
        """State that the optimizer has made in memory gets its place in the file."""
        writes = []
        for weight in piece.weights:
            for key, one in list(state.get(weight, {}).items()):
                if _alike(one, weight) and self._volume.locate(one) is None:
                    resting = self._volume.tensor(one.numel(), one.dtype)
                    state[weight][key] = resting
                    writes.append((resting, one))
        return writes

    def _finish(self, state: State) -> None:
        """Everything is written, also when the update broke off; the first failure is told."""
        failure: EngineError | None = None
        for buffer in self._buffers:
            try:
                buffer.wait()
            except EngineError as error:
                failure = failure or error
            _unbind(buffer, state)
        self._link.sent()
        if failure is not None:
            raise failure

    def _read(self, reads: Sequence[tuple[Tensor, Tensor]]) -> None:
        for resting, part in reads:
            self._volume.read(self._place(resting), part)

    def _write(self, writes: Sequence[tuple[Tensor, Tensor]]) -> None:
        for resting, value in writes:
            self._volume.write(self._place(resting), value)

    def _place(self, resting: Tensor) -> int:
        offset = self._volume.locate(resting)
        if offset is None:
            raise RuntimeError("a tensor outside the file was to rest there")
        return offset


def _trim() -> None:
    """Gives freed memory back to the system, where the C library can.

    glibc does not use again what posix_memalign(3) had: without this the heap would grow by every
    piece of state that an optimizer makes, although each is freed.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _bind(buffer: _Buffer, state: State) -> None:
    """The optimizer's tensors are those in memory from now on."""
    for weight, key, _, part in buffer.bound:
        if key is None:
            weight.data = part
        else:
            state[weight][key] = part


def _unbind(buffer: _Buffer, state: State) -> list[tuple[Tensor, Tensor]]:
    """The optimizer's tensors are those in the file again; what is to be written there."""
    writes = []
    for weight, key, resting, _ in buffer.bound:
        if key is None:
            writes.append((resting, weight.detach()))
            weight.data = resting
        else:
            writes.append((resting, state[weight][key]))
            state[weight][key] = resting
    buffer.bound.clear()
    return writes


def _alike(value: object, weight: Tensor) -> bool:
    """State with an element for each of the weight's."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == weight.shape
