"""Exchanges between ranks on one host: gloo sends tokens, data is read in place.

TCP on loopback copies every byte four times; here a reduction reads the peers' buffers in place,
and a gather is one copy. Each exchange has two messages per peer: *ready* says where to read,
*done* that it has been read.

Order. Exchanges run in launch order, and waiting for one runs all before it; so a rank that waits
has done its share of everything its peers may be waiting for, and no cycle can form. `drain` runs
the remaining ones before any other collective; `execute_all` before returning to the script, which
may call collectives itself. Peers may read a buffer until its exchange was released or drained;
waiting for that only before the buffer is overwritten saves a barrier per exchange.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rayzero.engine.comm.backend import rank_chunk
from rayzero.engine.comm.gloo_p2p import P2PWork
from rayzero.engine.comm.shm_segments import ReadabilityProbe, ShmSegments
from rayzero.engine.errors import EngineError

MAX_UNREAD = 64


class TokenChannel(Protocol):
    """Sends small tensors between ranks; messages of one pair and tag arrive in order."""

    rank: int
    world_size: int

    def next_tag(self) -> int:
        """The tag of a round of messages, the same on every rank."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> P2PWork:
        """Starts to send."""

    def recv(self, tensor: Tensor, peer: int, tag: int) -> P2PWork:
        """Starts to receive into `tensor`."""


class _TokenRound:
    """One message to and from each peer: a location to read from."""

    def __init__(self, channel: TokenChannel, peers: Sequence[int]) -> None:
        self._channel = channel
        self._tag = tag = channel.next_tag()
        self._locations = {peer: torch.empty(2, dtype=torch.int64) for peer in peers}
        self._receives = {
            peer: channel.recv(location, peer, tag) for peer, location in self._locations.items()
        }
        self._sends: list[P2PWork] = []

    def send(self, peer: int, location: tuple[int, int]) -> None:
        token = torch.tensor(location, dtype=torch.int64)
        self._sends.append(self._channel.send(token, peer, self._tag))

    def send_all(self) -> None:
        """Sends tokens without a location."""
        for peer in self._locations:
            self.send(peer, (0, 0))

    def recv(self, peer: int) -> tuple[int, int]:
        """Waits for the peer's message; once, because a second wait would never return."""
        self._receives.pop(peer).wait()
        descriptor, offset = self._locations[peer].tolist()
        return descriptor, offset

    def wait_all(self) -> None:
        """Waits for all messages still in flight."""
        while self._receives:
            self._receives.popitem()[1].wait()
        while self._sends:
            self._sends.pop().wait()


class SharedMemoryWork:
    """A collective in shared memory. `execute` runs once, in launch order."""

    def __init__(
        self, owner: SharedMemoryExchange, steps: Iterator[None], done: _TokenRound
    ) -> None:
        self._owner = owner
        self._steps = steps
        self._done_round = done
        self.finished = False

    def wait(self) -> None:
        self._owner.execute_until(self)

    def release(self) -> None:
        self.wait()
        self._done_round.wait_all()

    def execute(self) -> None:
        for _ in self._steps:
            pass
        self._done_round.send_all()
        self.finished = True


class SharedMemoryExchange:
    """Collectives over the segments of ranks on one host. Same contract as `Backend`'s."""

    def __init__(self, channel: TokenChannel, segments: ShmSegments) -> None:
        self.segments = segments
        self._channel = channel
        self._rank = channel.rank
        self._peers = [
            (channel.rank + step) % channel.world_size for step in range(1, channel.world_size)
        ]
        self._queued: deque[SharedMemoryWork] = deque()
        # Not yet known to have been read by all peers, oldest first.
        self._not_yet_read: deque[SharedMemoryWork] = deque()

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool) -> SharedMemoryWork:
        return self._launch(self._reduce_scatter(full, out, accumulate), self._peers)

    def all_gather(self, full: Tensor, part: Tensor) -> SharedMemoryWork:
        parts = {rank: self._rank_chunk(full, rank) for rank in (self._rank, *self._peers)}
        return self._launch(self._all_gather(parts, part, self._peers), self._peers)

    def all_gather_in_group(self, full: Tensor, part: Tensor, members: range) -> SharedMemoryWork:
        parts = dict(zip(members, full.chunk(len(members)), strict=True))
        peers = [peer for peer in self._peers if peer in parts]
        return self._launch(self._all_gather(parts, part, peers), peers)

    def all_reduce(self, full: Tensor) -> SharedMemoryWork:
        return self._launch(self._all_reduce(full), self._peers)

    def all_to_all(self, full: Tensor, received: Tensor) -> SharedMemoryWork:
        return self._launch(self._all_to_all(full, received), self._peers)

    def drain(self) -> None:
        """Runs everything launched, and waits until all peers have read this rank's buffers."""
        self.execute_all()
        while self._not_yet_read:
            self._not_yet_read.popleft().release()

    def execute_all(self) -> None:
        """Does this rank's share of everything launched."""
        while self._queued:
            self._queued.popleft().execute()

    def execute_until(self, exchange: SharedMemoryWork) -> None:
        while not exchange.finished:
            if not self._queued:  # it started, and failed
                raise RuntimeError("an earlier exchange failed")
            self._queued.popleft().execute()

    def _launch(self, steps: Iterator[None], peers: Sequence[int]) -> SharedMemoryWork:
        """Runs an exchange up to its first yield, which announces this rank's part."""
        next(steps)
        exchange = SharedMemoryWork(self, steps, self._token_round(peers))
        self._queued.append(exchange)
        self._not_yet_read.append(exchange)
        # An evaluation gathers weights repeatedly without a vote in between. A peer that waits
        # anywhere has done its share of all earlier exchanges, so this wait ends.
        while len(self._not_yet_read) > MAX_UNREAD and self._not_yet_read[0].finished:
            self._not_yet_read.popleft().release()
        return exchange

    def _reduce_scatter(self, full: Tensor, out: Tensor, accumulate: bool) -> Iterator[None]:
        ready = self._send_locations({peer: self._rank_chunk(full, peer) for peer in self._peers})
        yield
        self._sum_chunk(full, out, ready, accumulate=accumulate)

    def _all_gather(
        self, parts: dict[int, Tensor], part: Tensor, peers: Sequence[int]
    ) -> Iterator[None]:
        """`parts` are the destinations of all ranks' parts, including this one's."""
        ready = self._send_locations(dict.fromkeys(peers, part))
        own = parts[self._rank]
        if own.data_ptr() != part.data_ptr():
            own.copy_(part)
        yield
        self._copy_chunks({peer: parts[peer] for peer in peers}, ready)

    def _all_to_all(self, full: Tensor, received: Tensor) -> Iterator[None]:
        ready = self._send_locations({peer: self._rank_chunk(full, peer) for peer in self._peers})
        self._rank_chunk(received, self._rank).copy_(self._rank_chunk(full, self._rank))
        yield
        self._copy_chunks({peer: self._rank_chunk(received, peer) for peer in self._peers}, ready)

    def _all_reduce(self, full: Tensor) -> Iterator[None]:
        """Reduce-scatters, then all-gathers. A peer's part of `full` is overwritten only after the
        peer has announced its sum, for which it has read that part."""
        parts = {peer: self._rank_chunk(full, peer) for peer in self._peers}
        ready, summed = self._send_locations(parts), self._token_round(self._peers)
        yield
        own = self._rank_chunk(full, self._rank)
        self._sum_chunk(full, own, ready, accumulate=False)
        for peer in self._peers:
            summed.send(peer, self._location(own))
        self._copy_chunks(parts, summed)

    def _send_locations(self, parts: dict[int, Tensor]) -> _TokenRound:
        """Announces to each peer where to read its part."""
        ready = self._token_round(list(parts))
        for peer, part in parts.items():
            ready.send(peer, self._location(part))
        return ready

    def _sum_chunk(
        self, full: Tensor, out: Tensor, ready: _TokenRound, *, accumulate: bool
    ) -> None:
        """Sums this rank's part over the ranks, in a fixed order."""
        own = self._rank_chunk(full, self._rank)
        terms = [self.segments.view(peer, ready.recv(peer), own) for peer in self._peers]
        ready.wait_all()
        sum_terms(own, terms, out, accumulate=accumulate)

    def _copy_chunks(self, targets: dict[int, Tensor], ready: _TokenRound) -> None:
        for peer, target in targets.items():
            target.copy_(self.segments.view(peer, ready.recv(peer), target))
        ready.wait_all()

    def _token_round(self, peers: Sequence[int]) -> _TokenRound:
        return _TokenRound(self._channel, peers)

    def _location(self, part: Tensor) -> tuple[int, int]:
        location = self.segments.locate(part)
        if location is None:
            raise EngineError("a buffer that was not made by Collectives.zeros was exchanged")
        return location

    def _rank_chunk(self, full: Tensor, rank: int) -> Tensor:
        return rank_chunk(full, rank, len(self._peers) + 1)


def sum_terms(own: Tensor, terms: Sequence[Tensor], out: Tensor, *, accumulate: bool) -> None:
    """Sums this rank's term and the others' into `out`, which may be `own`, in the given order.

    This rank's term is first, so that its memory can hold the running sum.
    """
    if accumulate:
        out.add_(own)
    elif terms:
        torch.add(own, terms[0], out=out)
        terms = terms[1:]
    for term in terms:
        out.add_(term)


def try_shared_memory(
    channel: TokenChannel, group: dist.ProcessGroup
) -> SharedMemoryExchange | None:
    """An exchange over shared memory if all ranks can read each other's, else None on all of them.
    Collective."""
    probe = ReadabilityProbe()
    try:
        card = torch.tensor([probe.pid, probe.descriptor, probe.secret], dtype=torch.int64)
        cards = [torch.empty_like(card) for _ in range(channel.world_size)]
        dist.all_gather(cards, card, group=group)
        readable = all(ReadabilityProbe.is_readable(*other.tolist()) for other in cards)
        agreed = torch.tensor(int(readable))
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    finally:
        probe.close()
    if not agreed.item():
        return None
    return SharedMemoryExchange(channel, ShmSegments([int(other[0]) for other in cards]))
