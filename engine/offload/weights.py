"""Model weights whose shards rest in host memory and visit the device when a unit is gathered."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayzero.engine.comm.collectives import Collectives, Gathers, Pending, part_of
from rayzero.engine.layout.partition import UnitLayout
from rayzero.engine.offload.link import Link
from rayzero.engine.offload.place import Place
from rayzero.engine.zero.weights import ShardedWeights


class HostPath:
    """How shards come from host memory into slots: over the link, then from rank to rank, both
    beside the computation.

    Order. The copy starts after all that was enqueued on the compute stream, so kernels that read
    the slot's last occupant are done; and after `release` of the gather that was made from the slot
    before, so no other rank reads it.
    """

    def __init__(self, link: Link, collectives: Collectives, device: torch.device) -> None:
        self.device = device
        self._link = link
        self._collectives = collectives
        self._last: dict[int, Pending] = {}  # gather from each slot, by its address

    def slot(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._collectives.zeros(numel, dtype, self.device)

    def gather(self, full: Tensor, shard: Tensor, gathers: Gathers) -> Pending:
        before = self._last.pop(full.data_ptr(), None)
        if before is not None:
            before.release()
        own = part_of(full, gathers.rank, gathers.world_size)
        with self._link.ahead():
            own.copy_(shard, non_blocking=True)
            gathered = _Joined(gathers.all_gather(full, own), self._link)
        self._last[full.data_ptr()] = gathered
        return gathered


class HostWeights(ShardedWeights):
    """Sharded, the shard in host memory: no element of it stays on the device.

    Args:
        shard: in host memory.
        path: one for all units of a run.
    """

    rests = Place.HOST

    def __init__(
        self,
        layout: UnitLayout,
        params: tuple[nn.Parameter, ...],
        shard: Tensor,
        path: HostPath,
    ) -> None:
        super().__init__(layout, params, shard, path.device)
        self._path = path

    def _gather(self, full: Tensor, gathers: Gathers) -> Pending:
        return self._path.gather(full, self.shard, gathers)

    def new_slot(self, numel: int) -> Tensor:
        return self._path.slot(numel, self.shard.dtype)


class _Joined:
    """A gather whose own part came over a link."""

    def __init__(self, gathered: Pending, link: Link) -> None:
        self._gathered = gathered
        self._link = link

    def wait(self) -> None:
        self._gathered.wait()
        self._link.join()

    def release(self) -> None:
        self._gathered.release()
