"""The backend of `torch.distributed`: in order, asynchronous, and silent when a peer dies.

What it takes over from ProcessGroupNCCL: launches and waits return at once; errors are nobody's
exception; an abort takes time, ends what is queued, and leaves garbage; a second abort at the same
time fails; what is launched on an aborted group fails; a watchdog, which by torch's defaults ends
the process some time after it has seen an error, whatever the group's fate.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.nccl_like.mesh import Mesh
from tests.support.nccl_like.queues import Event
from tests.support.nccl_like.stream import VirtualDevice

POLL_S = 0.02


class NcclLikeWork(dist._Work):  # type: ignore[name-defined,misc]
    """A collective's work. `wait` lets the current stream wait for it, not the host."""

    def __init__(self, device: VirtualDevice, ended: Event, *, blocks: bool = False) -> None:
        super().__init__()
        self._device = device
        self._ended = ended
        self._blocks = blocks

    def wait(self, timeout: Any = None) -> bool:
        self._device.current_stream().wait_event(self._ended)
        if self._blocks:  # a barrier
            self._ended.synchronize()
        return True

    def is_completed(self) -> bool:
        return self._ended.query()


class NcclLikeGroup(dist.ProcessGroup):
    """One rank's group. Launched by one thread, aborted by any.

    Its collectives run in a stream of its own, behind what the launching thread's stream has.
    """

    should_dump: ClassVar[bool] = False
    """Static in ProcessGroupNCCL, too: it outlives the group that has seen the error."""

    def __init__(self, store: Any, rank: int, size: int, device: VirtualDevice) -> None:
        super().__init__(rank, size)
        self.stream = device.add_stream()
        self._device = device
        self._random = random.Random(f"{device.settings.seed} {rank} {size}")
        self._mesh = Mesh(store, rank, size)
        time.sleep(device.settings.init_s)
        self._launched = 0
        self._abort_lock = threading.Lock()
        self._aborted = False
        self._lost_at_s: float | None = None
        self._has_error = False
        self._ends_process = _flag("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
        self._dumps = _flag("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        self._monitored = _flag("TORCH_NCCL_ENABLE_MONITORING", "1")
        watchdog = threading.Thread(target=self._watch, name="nccl-like-watchdog", daemon=True)
        watchdog.start()

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return "nccl_like"

    def _get_backend(self, device: Any) -> Any:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._launched

    def get_error(self) -> Any:
        """What the watchdog has found; torch's is an enum."""
        return SimpleNamespace(name="REMOTE_ERROR" if self._has_error else "SUCCESS")

    # Collectives. Lists are torch's: one entry for each device of the process.

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        tensor = tensors[0].data

        def run() -> None:
            tensor.copy_(_total(self._everyones(tensor)))

        return self._launch(run, [tensor])

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        tensor, source = tensors[0].data, opts.rootRank

        def run() -> None:
            others = [peer for peer in range(self.size()) if peer != self.rank()]
            if source == self.rank():
                self._mesh.exchange(dict.fromkeys(others, _bytes(tensor)), {})
            else:
                received = self._mesh.exchange({}, {source: tensor.nbytes})
                _put(tensor, received[source])

        return self._launch(run, [tensor])

    def all_gather_single(self, output: Tensor, part: Tensor, opts: Any = None) -> dist.Work:
        output, part = output.data, part.data

        def run() -> None:
            parts = [one.reshape(-1) for one in self._everyones(part)]
            output.copy_(torch.cat(parts).view_as(output))

        return self._launch(run, [output])

    def reduce_scatter_single(self, output: Tensor, full: Tensor, opts: Any = None) -> dist.Work:
        output, full = output.data, full.data

        def run() -> None:
            parts = list(full.reshape(-1).chunk(self.size()))
            received = [torch.empty_like(output).reshape(-1) for _ in parts]
            self._all_to_all(received, parts)
            output.copy_(_total(received).view_as(output))

        return self._launch(run, [output])

    def all_to_all_single(
        self, output: Tensor, full: Tensor, out_splits: Any, in_splits: Any, opts: Any = None
    ) -> dist.Work:
        assert not out_splits, "uneven parts are not used"
        assert not in_splits, "uneven parts are not used"
        size = self.size()
        received, parts = list(output.data.chunk(size)), list(full.data.chunk(size))
        return self._launch(lambda: self._all_to_all(received, parts), [output])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._launch(lambda: self._all_to_all(outputs, inputs), outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        (part,), target = inputs, opts.rootRank
        parts = outputs[0] if target == self.rank() else []

        def run() -> None:
            if target != self.rank():
                self._mesh.exchange({target: _bytes(part)}, {})
                return
            others = {peer: part.nbytes for peer in range(self.size()) if peer != target}
            for peer, data in self._mesh.exchange({}, others).items():
                _put(parts[peer], data)
            parts[target].copy_(part)

        return self._launch(run, parts)

    def barrier(self, opts: Any = None) -> dist.Work:
        one = torch.ones(1)
        return self._launch(lambda: self._everyones(one) and None, [], blocks=True)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _launch(
        self, run: Callable[[], Any], outputs: Sequence[Tensor], *, blocks: bool = False
    ) -> dist.Work:
        if self._aborted:
            text = "NCCL communicator was aborted on this rank: invalid usage"
            raise self._random.choice((ValueError, dist.DistBackendError))(text)
        late_s = self._device.settings.late_error_s
        if late_s is not None and self._lost_at_s and time.monotonic() > self._lost_at_s + late_s:
            raise dist.DistBackendError("NCCL error: remote process exited or network error")

        def kernel() -> None:
            try:
                run()
            except InterruptedError:
                for output in outputs:
                    self._leave_garbage(output)

        self._launched += 1
        self.stream.wait_stream(self._device.current_stream())
        self.stream.launch(kernel)
        return NcclLikeWork(self._device, self.stream.record(), blocks=blocks)

    def _everyones(self, tensor: Tensor) -> list[Tensor]:
        own, others = _bytes(tensor), [peer for peer in range(self.size()) if peer != self.rank()]
        received = self._mesh.exchange(
            dict.fromkeys(others, own), dict.fromkeys(others, tensor.nbytes)
        )
        terms = [torch.empty_like(tensor) for _ in range(self.size())]
        for peer, term in enumerate(terms):
            _put(term, received.get(peer, own))
        return terms

    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        others = [peer for peer in range(self.size()) if peer != self.rank()]
        data = self._mesh.exchange(
            {peer: _bytes(sent[peer]) for peer in others},
            {peer: received[peer].nbytes for peer in others},
        )
        for peer in others:
            _put(received[peer], data[peer])
        received[self.rank()].copy_(sent[self.rank()])

    def _leave_garbage(self, output: Tensor) -> None:
        """What a kernel leaves that returns early: what was there, half a sum, anything."""
        kind = self._device.settings.garbage
        if kind == "any":
            kind = self._random.choice(("nan", "plausible", "random"))
        if not output.is_floating_point():
            output.fill_(self._random.randrange(2))
        elif kind == "nan":
            output.fill_(float("nan"))
        elif kind == "random":
            output.copy_(torch.randn(output.shape) * 10 ** self._random.uniform(-3, 3))

    # Aborts and errors

    def abort(self) -> None:
        """Frees this rank's kernels halfway. Raises DistBackendError if another thread is in it."""
        if not self._abort_lock.acquire(blocking=False):
            raise dist.DistBackendError("NCCL error: ncclCommAbort is running in another thread")
        try:
            if self._aborted:
                return
            time.sleep(self._device.settings.abort_s / 2)
            self._aborted = True
            self._mesh.abort()
            time.sleep(self._device.settings.abort_s / 2)
            self.stream.end(self._mesh.close)
        finally:
            self._abort_lock.release()

    def shutdown(self) -> None:
        self.abort()

    def _watch(self) -> None:
        """ProcessGroupNCCL's watchdog and heartbeat monitor, with their defaults."""
        while not self._aborted:
            if self._lost_at_s is None and self._mesh.look():
                self._lost_at_s = time.monotonic()
            lost = self._lost_at_s
            if lost is not None and time.monotonic() > lost + self._device.settings.watchdog_s:
                self._has_error = True
                NcclLikeGroup.should_dump |= self._dumps
                if self._ends_process:
                    self._end_process("the watchdog rethrows an error")
                break
            if NcclLikeGroup.should_dump and self._monitored:
                self._end_process("the heartbeat monitor has seen a request to dump")
                return
            time.sleep(POLL_S)

    def _end_process(self, reason: str) -> None:
        """As `std::terminate`, once the debug information is written."""
        time.sleep(self._device.settings.dump_s)
        os.write(2, f"nccl-like: {reason}, the process ends\n".encode())
        os._exit(134)


def _flag(name: str, default: str) -> bool:
    return os.environ.get(name, default).lower() not in ("0", "false", "n", "no")


def _total(terms: Sequence[Tensor]) -> Tensor:
    """In the order of the ranks: the same on all of them."""
    total = terms[0].clone()
    for term in terms[1:]:
        total.add_(term)
    return total


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.contiguous()
    # Not by numpy: torch then marks the storage like one of the host's.
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.numel() else b""


def _put(tensor: Tensor, data: bytes) -> None:
    if data:
        tensor.copy_(torch.frombuffer(bytearray(data), dtype=tensor.dtype).view(tensor.shape))
