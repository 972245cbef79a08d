"""The gloo backend: reduce-scatter and all-gather from point-to-point messages.

gloo's own reduce_scatter_tensor and all_gather_into_tensor copy through temporaries and take three
times as long. Here every rank posts all sends and receives at once. That moves as many bytes as a
ring, and no rank waits for another's partial sum. Sums have a fixed order, so results do not depend
on timing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rayzero.engine.comm.backend import AsyncWork, Backend, Work, copy_unless_same, rank_chunk
from rayzero.engine.comm.gloo_p2p import P2PWork, p2p_channel


class StagingPool:
    """Reused receive buffers: touching new pages costs far more than a copy.

    A buffer is in use from the launch of a collective until its wait.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self.total_bytes = 0

    def acquire(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Returns a buffer of at least `numel` elements."""
        for index, buffer in enumerate(self._free):
            if buffer.dtype is dtype and buffer.numel() >= numel:
                return self._free.pop(index)
        buffer = torch.empty(numel, dtype=dtype)
        self.total_bytes += buffer.nbytes
        return buffer

    def release(self, buffers: Iterable[Tensor]) -> None:
        self._free.extend(buffers)


class GlooBackend(Backend):
    """The backend of CPU ranks that exchange messages. `group` has two ranks or more."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        # The other ranks, nearest first, so that not all ranks start with rank 0.
        steps = range(1, self.world_size)
        self.peers = [(self.rank + step) % self.world_size for step in steps]
        self.channel = p2p_channel(group)
        self.channel.drain_leftovers()
        self._staging = StagingPool()

    @property
    def staging_bytes(self) -> int:
        return self._staging.total_bytes

    def abandon(self) -> None:
        """Drops unfinished messages, which refer to the group's connections and to buffers."""
        self.channel.in_flight.clear()

    def all_reduce(self, full: Tensor) -> Work:
        return AsyncWork([dist.all_reduce(full, group=self.channel.group, async_op=True)])

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool) -> Work:
        parts = self.chunks(full)
        own = parts.pop(self.rank)
        buffers = {peer: self._staging.acquire(own.dtype, own.numel()) for peer in self.peers}
        received = {peer: buffer[: own.numel()] for peer, buffer in buffers.items()}

        def add_up() -> None:
            sum_terms(own, list(received.values()), out, accumulate=accumulate)
            self._staging.release(buffers.values())

        return AsyncWork(self._post_messages(received, parts), add_up)

    def all_gather(self, full: Tensor, part: Tensor) -> Work:
        return self._all_gather(self.chunks(full), part)

    def all_gather_in_group(self, full: Tensor, part: Tensor, members: range) -> Work:
        return self._all_gather(dict(zip(members, full.chunk(len(members)), strict=True)), part)

    def _all_gather(self, parts: dict[int, Tensor], part: Tensor) -> Work:
        return self._copy_parts(dict.fromkeys(parts, part), parts)

    def all_to_all(self, full: Tensor, received: Tensor) -> Work:
        return self._copy_parts(self.chunks(full), self.chunks(received))

    def _copy_parts(self, sent: dict[int, Tensor], received: dict[int, Tensor]) -> Work:
        """Sends each rank, also this one, its tensor of `sent`, and receives `received`."""
        copy_unless_same(received.pop(self.rank), sent.pop(self.rank))
        return AsyncWork(self._post_messages(received, sent))

    def gather(self, full: Tensor, part: Tensor, target: int) -> Work:
        if self.rank != target:
            return AsyncWork(self._post_messages({}, {target: part}))
        parts = self.chunks(full)
        parts.pop(target).copy_(part)
        return AsyncWork(self._post_messages(parts, {}))

    def all_to_all_v(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        received[self.rank].copy_(sent[self.rank])
        return AsyncWork(
            self._post_messages(
                {peer: received[peer] for peer in self.peers if received[peer].numel()},
                {peer: sent[peer] for peer in self.peers if sent[peer].numel()},
            )
        )

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        group = self.channel.group
        return AsyncWork([dist.broadcast(tensor, group=group, group_src=source, async_op=True)])

    def chunks(self, full: Tensor) -> dict[int, Tensor]:
        """Returns each rank's part of `full`: peers in the order of `peers`, then this rank."""
        ranks = (*self.peers, self.rank)
        return {rank: rank_chunk(full, rank, self.world_size) for rank in ranks}

    def _post_messages(self, receive: dict[int, Tensor], send: dict[int, Tensor]) -> list[P2PWork]:
        """Starts the messages of one collective. Receives first, so that no send has to buffer."""
        tag = self.channel.next_tag()
        works = [self.channel.recv(tensor, peer, tag) for peer, tensor in receive.items()]
        return works + [self.channel.send(tensor, peer, tag) for peer, tensor in send.items()]


def sum_terms(own: Tensor, terms: Sequence[Tensor], out: Tensor, *, accumulate: bool) -> None:
    """Sums this rank's term `own` and the other ranks' `terms` into `out`, in this order. `own` is
    first because `out` may be the same memory, which then holds the running sum.
    """
    if accumulate:
        out.add_(own)
    else:
        torch.add(own, terms[0], out=out)
        terms = terms[1:]
    for term in terms:
        out.add_(term)
