"""The gloo backend: reduce-scatter and all-gather from point-to-point messages.

gloo's own reduce_scatter_tensor and all_gather_into_tensor copy through temporaries and take three
times as long. Here every rank posts all sends and receives at once: the same bytes as a ring, with
no rank waiting for another's partial sum. Sums have a fixed order, so a result does not depend on
timing. If all ranks are on one host, buffers are in shared memory and only tokens are sent
(`shared_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rayzero.engine.comm.backend import Work, rank_chunk
from rayzero.engine.comm.gloo_p2p import GroupRef, P2PWork, p2p_channel
from rayzero.engine.comm.shared_memory import sum_terms, try_shared_memory


class _GlooWork:
    """Messages in flight, and a callback for when all have arrived. Waits once."""

    def __init__(
        self, works: Sequence[dist.Work | P2PWork], finish: Callable[[], None] | None = None
    ) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = ()
        if self._finish is not None:
            self._finish()
            self._finish = None

    def release(self) -> None:
        self.wait()


class StagingPool:
    """Reused receive buffers: touching new pages costs far more than a copy.

    A buffer is in use from the launch of a collective until its wait.
    """

    def __init__(self) -> None:
        self._free: dict[torch.dtype, list[Tensor]] = {}
        self.total_bytes = 0

    def acquire(self, dtype: torch.dtype, numel: int) -> Tensor:
        """A buffer of at least `numel` elements."""
        free = self._free.setdefault(dtype, [])
        for index, buffer in enumerate(free):
            if buffer.numel() >= numel:
                return free.pop(index)
        buffer = torch.empty(numel, dtype=dtype)
        self.total_bytes += buffer.nbytes
        return buffer

    def release(self, buffer: Tensor) -> None:
        self._free[buffer.dtype].append(buffer)


class GlooBackend:
    """CPU ranks.

    Args:
        group: a gloo group of two ranks or more.
        share_memory: exchange through shared memory if all ranks can.
    """

    def __init__(self, group: dist.ProcessGroup, *, share_memory: bool = True) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._group_ref = GroupRef(group)
        self._staging = StagingPool()
        self._channel = p2p_channel(group)
        self._channel.drain_leftovers(group)
        self._shared_memory = try_shared_memory(self, group) if share_memory else None

    @property
    def staging_bytes(self) -> int:
        return self._staging.total_bytes

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._shared_memory is not None:
            return self._shared_memory.segments.zeros(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    def progress_pending(self) -> None:
        if self._shared_memory is not None:  # point-to-point messages need no help
            self._shared_memory.execute_all()

    def all_reduce(self, full: Tensor) -> Work:
        if self._shared_memory is not None:
            if self._shared_memory.segments.locate(full) is not None:
                return self._shared_memory.all_reduce(full)
            self._shared_memory.drain()
        return _GlooWork([dist.all_reduce(full, group=self._group_ref.group, async_op=True)])

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool) -> Work:
        if self._shared_memory is not None:
            return self._shared_memory.reduce_scatter(full, out, accumulate=accumulate)
        own = self._rank_chunk(full, self.rank)
        buffers = {peer: self._staging.acquire(own.dtype, own.numel()) for peer in self._peers()}
        received = {peer: buffer[: own.numel()] for peer, buffer in buffers.items()}
        works = self._post_messages(
            receive=received, send={peer: self._rank_chunk(full, peer) for peer in self._peers()}
        )

        def add_up() -> None:
            sum_terms(own, [received[peer] for peer in self._peers()], out, accumulate=accumulate)
            for buffer in buffers.values():
                self._staging.release(buffer)

        return _GlooWork(works, add_up)

    def all_gather(self, full: Tensor, part: Tensor) -> Work:
        if self._shared_memory is not None:
            return self._shared_memory.all_gather(full, part)
        own = self._rank_chunk(full, self.rank)
        if own.data_ptr() != part.data_ptr():
            own.copy_(part)
        works = self._post_messages(
            receive={peer: self._rank_chunk(full, peer) for peer in self._peers()},
            send=dict.fromkeys(self._peers(), part),
        )
        return _GlooWork(works)

    def all_gather_in_group(self, full: Tensor, part: Tensor, members: range) -> Work:
        if self._shared_memory is not None:
            return self._shared_memory.all_gather_in_group(full, part, members)
        parts = dict(zip(members, full.chunk(len(members)), strict=True))
        parts.pop(self.rank).copy_(part)
        return _GlooWork(self._post_messages(receive=parts, send=dict.fromkeys(parts, part)))

    def all_to_all(self, full: Tensor, received: Tensor) -> Work:
        if self._shared_memory is not None:
            return self._shared_memory.all_to_all(full, received)
        self._rank_chunk(received, self.rank).copy_(self._rank_chunk(full, self.rank))
        return _GlooWork(
            self._post_messages(
                receive={peer: self._rank_chunk(received, peer) for peer in self._peers()},
                send={peer: self._rank_chunk(full, peer) for peer in self._peers()},
            )
        )

    def gather(self, full: Tensor, part: Tensor, target: int) -> Work:
        self._drain_shared_memory()
        if self.rank != target:
            return _GlooWork(self._post_messages(receive={}, send={target: part}))
        self._rank_chunk(full, target).copy_(part)
        return _GlooWork(
            self._post_messages(
                receive={peer: self._rank_chunk(full, peer) for peer in self._peers()}, send={}
            )
        )

    def all_to_all_v(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        self._drain_shared_memory()
        received[self.rank].copy_(sent[self.rank])
        return _GlooWork(
            self._post_messages(
                receive={peer: received[peer] for peer in self._peers() if received[peer].numel()},
                send={peer: sent[peer] for peer in self._peers() if sent[peer].numel()},
            )
        )

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._drain_shared_memory()
        dist.broadcast(tensor, group=self._group_ref.group, group_src=source)

    def next_tag(self) -> int:
        return self._channel.next_tag()

    def send(self, tensor: Tensor, peer: int, tag: int) -> P2PWork:
        return self._channel.send(self._group_ref.group, tensor, peer, tag)

    def recv(self, tensor: Tensor, peer: int, tag: int) -> P2PWork:
        return self._channel.recv(self._group_ref.group, tensor, peer, tag)

    def _drain_shared_memory(self) -> None:
        if self._shared_memory is not None:
            self._shared_memory.drain()

    def _post_messages(self, receive: dict[int, Tensor], send: dict[int, Tensor]) -> list[P2PWork]:
        """Starts the messages of one collective; receives first, so that no send has to buffer."""
        tag = self.next_tag()
        works = [self.recv(tensor, peer, tag) for peer, tensor in receive.items()]
        return works + [self.send(tensor, peer, tag) for peer, tensor in send.items()]

    def _peers(self) -> list[int]:
        """The other ranks, nearest first, so that not all ranks start with rank 0."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def _rank_chunk(self, full: Tensor, rank: int) -> Tensor:
        return rank_chunk(full, rank, self.world_size)
