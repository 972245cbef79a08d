"""The process group that `NcclBackend` calls, with NCCL's semantics on virtual streams.

A collective is launched on its communicator's stream, after what is enqueued on the launching
stream. `wait` makes the current stream wait for it, not the host. Its tensors are kept until then.

`Alone` simulates one of several ranks: every other has the same values. `Ranks` are threads of one
process that exchange what they have, and must launch the same collectives in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.virtual_device.machine import Machine, current_machine
from tests.support.virtual_device.timelines import Clock, VirtualStream, merge

Parts = list[list[Tensor]]  # what every rank of a group passed in
WAIT_S = 60.0  # for another rank's thread

# NCCL has no type for these (ProcessGroupNCCL's ncclDataType).
_REFUSED = {torch.int16, torch.complex64, torch.complex128}


class LaunchOrderError(RuntimeError):
    """Two ranks launched different collectives."""


@contextmanager
def _unbooked():
    """Moves data whose movement is booked otherwise."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


class Alone:
    """One rank of `world_size`; the others have its values."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    def exchange(self, what: tuple[str, str, int, str], own: list[Tensor], size: int) -> Parts:
        return [own] * size


class Ranks:
    """Ranks in threads."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size)
        self._posted: list[Any] = [None] * world_size
        self._local = threading.local()

    @property
    def rank(self) -> int:
        rank: int = self._local.rank
        return rank

    def abort(self) -> None:
        """A rank failed: the others' waits end."""
        self._barrier.abort()

    def barrier(self) -> None:
        self._barrier.wait(WAIT_S)

    def run(self, work: Callable[[int], None]) -> None:
        """Calls it for each rank, in threads."""

        def run(rank: int) -> None:
            self._local.rank = rank
            try:
                work(rank)
            except BaseException:
                self.abort()
                raise

        with ThreadPoolExecutor(self.world_size) as pool:
            for _ in pool.map(run, range(self.world_size)):
                pass

    def exchange(self, what: tuple[str, str, int, str], own: list[Tensor], size: int) -> Parts:
        """What all ranks passed in. Raises LaunchOrderError if they launched different ones."""
        if size != self.world_size:
            raise NotImplementedError("groups within ranks in threads")
        with _unbooked():
            self._posted[self.rank] = what, [tensor.clone() for tensor in own]
        self.barrier()
        posted = list(self._posted)
        self.barrier()
        if any(launched != what for launched, _ in posted):
            raise LaunchOrderError(f"the ranks launched {[launched for launched, _ in posted]}")
        return [tensors for _, tensors in posted]


@dataclass
class _Work:
    """A collective in flight; `tensors` are kept until it has been waited for."""

    done: Clock
    tensors: Sequence[Tensor] = field(default_factory=tuple)
    waited: bool = False

    def wait(self) -> bool:
        machine = current_machine()
        merge(machine.stream.clock, self.done)
        machine.in_flight -= not self.waited
        self.tensors, self.waited = (), True
        return True


@dataclass(frozen=True)
class Group:
    """A communicator."""

    name: str
    size: int


def _others(full: Tensor, part: Tensor) -> list[Tensor]:
    """What an all-gather writes: in place, it does not touch this rank's part."""
    start = (part.data_ptr() - full.data_ptr()) // full.element_size()
    if full.untyped_storage()._cdata != part.untyped_storage()._cdata:
        return [full]
    flat = full.view(-1)
    return [flat[:start], flat[start + part.numel() :]] if 0 <= start < full.numel() else [full]


class VirtualNccl:
    """Stands for `torch.distributed` in `engine/comm/nccl.py`. One object serves all ranks."""

    def __init__(self, ranks: Alone | Ranks) -> None:
        self._ranks = ranks
        self.world = Group("world", ranks.world_size)
        self._streams: dict[tuple[Machine, str], VirtualStream] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    def get_rank(self, group: Group | None = None) -> int:
        return self._ranks.rank

    def get_world_size(self, group: Group | None = None) -> int:
        return (group or self.world).size

    def new_subgroups(self, size: int, group: Group | None = None) -> tuple[Group, list[Group]]:
        made = Group(f"subgroup of {size}", size)
        return made, [made]

    def all_reduce(self, tensor: Tensor, group: Group | None = None, async_op: bool = False) -> Any:
        def move(parts: Parts) -> None:
            tensor.copy_(torch.stack([tensors[0] for tensors in parts]).sum(0))

        return self._launch("all_reduce", group, [tensor], [tensor], move, async_op)

    def broadcast(
        self, tensor: Tensor, group: Group | None = None, group_src: int = 0, async_op: bool = False
    ) -> Any:
        own = [tensor] if self._ranks.rank == group_src else []

        def move(parts: Parts) -> None:
            tensor.copy_(parts[group_src][0] if parts[group_src] else tensor)

        return self._launch(f"broadcast {group_src}", group, own, [tensor], move, async_op, tensor)

    def all_gather_single(
        self, full: Tensor, part: Tensor, group: Group | None = None, async_op: bool = False
    ) -> Any:
        size = (group or self.world).size
        if full.numel() != size * part.numel() or full.dtype is not part.dtype:
            raise RuntimeError(f"all_gather of {size} x {part.numel()} into {full.numel()}")

        def move(parts: Parts) -> None:
            gathered = torch.cat([tensors[0].reshape(-1) for tensors in parts])
            full.view(-1).copy_(gathered)

        return self._launch("all_gather", group, [part], _others(full, part), move, async_op)

    def reduce_scatter_single(
        self, out: Tensor, full: Tensor, group: Group | None = None, async_op: bool = False
    ) -> Any:
        size = (group or self.world).size
        if full.numel() != size * out.numel() or full.dtype is not out.dtype:
            raise RuntimeError(f"reduce_scatter of {full.numel()} into {size} x {out.numel()}")
        inside = out.untyped_storage()._cdata == full.untyped_storage()._cdata

        def move(parts: Parts) -> None:
            own = [tensors[0].view(size, -1)[self._ranks.rank % size] for tensors in parts]
            out.view(-1).copy_(torch.stack(own).sum(0))

        # In place, NCCL leaves the rest of the buffer undefined.
        written = [out, full] if inside else [out]
        return self._launch("reduce_scatter", group, [full], written, move, async_op)

    def all_to_all_single(
        self, out: Tensor, full: Tensor, group: Group | None = None, async_op: bool = False
    ) -> Any:
        size = (group or self.world).size

        def move(parts: Parts) -> None:
            received = [tensors[0].view(size, -1)[self._ranks.rank] for tensors in parts]
            out.view(-1).copy_(torch.cat(received))

        return self._launch("all_to_all_single", group, [full], [out], move, async_op)

    def all_to_all(
        self,
        outs: list[Tensor],
        sent: list[Tensor],
        group: Group | None = None,
        async_op: bool = False,
    ) -> Any:
        def move(parts: Parts) -> None:
            for out, tensors in zip(outs, parts, strict=True):
                source = tensors[self._ranks.rank]
                if out.numel() == source.numel():
                    out.copy_(source)
                else:  # `Alone`, where lengths are others'; memory as it was may hold NaN
                    out.zero_()

        return self._launch("all_to_all", group, sent, outs, move, async_op, outs[0])

    def gather(
        self,
        part: Tensor,
        parts: list[Tensor] | None,
        group: Group | None = None,
        group_dst: int = 0,
        async_op: bool = False,
    ) -> Any:
        def move(sent: Parts) -> None:
            for out, tensors in zip(parts or (), sent, strict=False):
                out.copy_(tensors[0])

        return self._launch(f"gather {group_dst}", group, [part], parts or [], move, async_op)

    def _launch(
        self,
        name: str,
        group: Group | None,
        reads: list[Tensor],
        writes: list[Tensor],
        move: Any,
        async_op: bool,
        named: Tensor | None = None,
    ) -> _Work | None:
        """Books a collective on the communicator's stream, and moves the data at once. `named`
        gives its size and dtype, which are those of the first tensor read otherwise."""
        machine, group = current_machine(), group or self.world
        first = reads[0] if named is None else named
        with _unbooked():
            for tensor in (*reads, *writes):
                if machine.home_of(tensor).on_host or not tensor.is_contiguous():
                    raise RuntimeError(f"NCCL refuses {name}: host memory, or not contiguous")
                if tensor.dtype in _REFUSED:
                    raise RuntimeError(f"NCCL has no type for {tensor.dtype}")
            numel = 0 if name == "all_to_all" else first.numel()  # lengths differ by rank
            what = (group.name, name, numel, str(first.dtype))
            machine.launches.append(what)
            move(self._ranks.exchange(what, reads, group.size))
        stream = machine.compute
        if async_op:
            key = machine, group.name
            if key not in self._streams:
                self._streams[key] = machine.new_stream("nccl")
            stream = self._streams[key]
            stream.wait_stream(machine.stream)
        machine.run(f"nccl {name}", reads, writes, stream)
        if not async_op:
            return None
        machine.in_flight += 1
        machine.most_in_flight = max(machine.most_in_flight, machine.in_flight)
        return _Work(dict(stream.clock), (*reads, *writes))
