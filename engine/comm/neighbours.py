"""Exchanges between ranks on one host: tokens go through gloo, data is read where it lies.

TCP on loopback copies every byte four times; here a sum reads the peers' buffers in place, and a
gather is one copy. Each exchange has two messages a peer: *ready* says where to read, *done* that
it has been read.

Order. Exchanges are carried out in launch order, and waiting for one carries out all before it; so
a rank that waits has done its part of whatever its peers may be waiting for, and no cycle can
form. Before any other collective, `drain` carries out what is left; before user code goes on, which
may hold collectives that nobody sees here, `carry_out_all` does. Peers may read a buffer until
its exchange was released or drained; waiting for that only when it is to be overwritten keeps ranks
from waiting for each other at every exchange.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rayzero.engine.comm.collectives import part_of
from rayzero.engine.comm.mail import Message
from rayzero.engine.comm.segments import Probe, Segments
from rayzero.engine.errors import EngineError

MOST_UNREAD = 64


class Messenger(Protocol):
    """Sends small tensors between ranks; every pair's messages of one tag arrive in order."""

    rank: int
    world_size: int

    def tag(self) -> int:
        """One for a round of messages, the same on every rank."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> Message:
        """Starts to send."""

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Message:
        """Starts to receive into `tensor`."""


class _Round:
    """One message from each peer and one to each: 'my part is there, read it at this place'."""

    def __init__(self, messenger: Messenger, peers: Sequence[int]) -> None:
        self._messenger = messenger
        self._tag = tag = messenger.tag()
        self._places = {peer: torch.empty(2, dtype=torch.int64) for peer in peers}
        self._arriving = {
            peer: messenger.receive(place, peer, tag) for peer, place in self._places.items()
        }
        self._leaving: list[Message] = []

    def tell(self, peer: int, place: tuple[int, int]) -> None:
        token = torch.tensor(place, dtype=torch.int64)
        self._leaving.append(self._messenger.send(token, peer, self._tag))

    def tell_all(self) -> None:
        """To rounds that say no more than that they are there."""
        for peer in self._places:
            self.tell(peer, (0, 0))

    def hear(self, peer: int) -> tuple[int, int]:
        """Waits for the peer's message; once, because a second wait would never return."""
        self._arriving.pop(peer).wait()
        descriptor, offset = self._places[peer].tolist()
        return descriptor, offset

    def end(self) -> None:
        """Waits for all that is still under way."""
        while self._arriving:
            self._arriving.popitem()[1].wait()
        while self._leaving:
            self._leaving.pop().wait()


class Exchange:
    """A collective among neighbours. `carry_out` runs once, in launch order."""

    def __init__(self, owner: Neighbours, steps: Iterator[None], done: _Round) -> None:
        self._owner = owner
        self._steps = steps
        self._done = done
        self.finished = False

    def wait(self) -> None:
        self._owner.carry_out_until(self)

    def release(self) -> None:
        self.wait()
        self._done.end()

    def carry_out(self) -> None:
        for _ in self._steps:
            pass
        self._done.tell_all()
        self.finished = True


class Neighbours:
    """Collectives over the segments of ranks on one host. Same contract as `Backend`'s."""

    def __init__(self, messenger: Messenger, segments: Segments) -> None:
        self.segments = segments
        self._messenger = messenger
        self._rank = messenger.rank
        self._peers = [
            (messenger.rank + step) % messenger.world_size
            for step in range(1, messenger.world_size)
        ]
        self._waiting: deque[Exchange] = deque()
        self._unread: deque[Exchange] = deque()  # not yet known to be read by all, oldest first

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool) -> Exchange:
        return self._launch(self._reduce_scatter(full, out, accumulate), self._peers)

    def all_gather(self, full: Tensor, part: Tensor) -> Exchange:
        parts = {rank: self._part(full, rank) for rank in (self._rank, *self._peers)}
        return self._launch(self._all_gather(parts, part, self._peers), self._peers)

    def all_gather_among(self, full: Tensor, part: Tensor, members: range) -> Exchange:
        parts = dict(zip(members, full.chunk(len(members)), strict=True))
        peers = [peer for peer in self._peers if peer in parts]
        return self._launch(self._all_gather(parts, part, peers), peers)

    def all_reduce(self, full: Tensor) -> Exchange:
        return self._launch(self._all_reduce(full), self._peers)

    def all_to_all(self, full: Tensor, received: Tensor) -> Exchange:
        return self._launch(self._all_to_all(full, received), self._peers)

    def drain(self) -> None:
        """Carries out everything launched, and waits until all peers have read what is ours."""
        self.carry_out_all()
        while self._unread:
            self._unread.popleft().release()

    def carry_out_all(self) -> None:
        """Does this rank's part of everything launched."""
        while self._waiting:
            self._waiting.popleft().carry_out()

    def carry_out_until(self, exchange: Exchange) -> None:
        while not exchange.finished:
            if not self._waiting:  # it was begun, and broke off
                raise RuntimeError("an earlier exchange failed")
            self._waiting.popleft().carry_out()

    def _launch(self, steps: Iterator[None], peers: Sequence[int]) -> Exchange:
        """Runs an exchange to its first stop: its own part is announced."""
        next(steps)
        exchange = Exchange(self, steps, self._round(peers))
        self._waiting.append(exchange)
        self._unread.append(exchange)
        # An evaluation gathers weights again and again with no vote between. A peer
        # that waits anywhere has done its part of all before, so this wait ends.
        while len(self._unread) > MOST_UNREAD and self._unread[0].finished:
            self._unread.popleft().release()
        return exchange

    def _reduce_scatter(self, full: Tensor, out: Tensor, accumulate: bool) -> Iterator[None]:
        ready = self._announce({peer: self._part(full, peer) for peer in self._peers})
        yield
        self._sum(full, out, ready, accumulate=accumulate)

    def _all_gather(
        self, parts: dict[int, Tensor], part: Tensor, peers: Sequence[int]
    ) -> Iterator[None]:
        """`parts` are where the ranks' parts go, this rank's included."""
        ready = self._announce(dict.fromkeys(peers, part))
        own = parts[self._rank]
        if own.data_ptr() != part.data_ptr():
            own.copy_(part)
        yield
        self._copy({peer: parts[peer] for peer in peers}, ready)

    def _all_to_all(self, full: Tensor, received: Tensor) -> Iterator[None]:
        ready = self._announce({peer: self._part(full, peer) for peer in self._peers})
        self._part(received, self._rank).copy_(self._part(full, self._rank))
        yield
        self._copy({peer: self._part(received, peer) for peer in self._peers}, ready)

    def _all_reduce(self, full: Tensor) -> Iterator[None]:
        """Scatters sums, then gathers them. A peer's part of ours is overwritten only when it has
        announced its sum, for which it has read that part before."""
        parts = {peer: self._part(full, peer) for peer in self._peers}
        ready, summed = self._announce(parts), self._round(self._peers)
        yield
        own = self._part(full, self._rank)
        self._sum(full, own, ready, accumulate=False)
        for peer in self._peers:
            summed.tell(peer, self._place(own))
        self._copy(parts, summed)

    def _announce(self, parts: dict[int, Tensor]) -> _Round:
        """Tells each peer where to read its part."""
        ready = self._round(list(parts))
        for peer, part in parts.items():
            ready.tell(peer, self._place(part))
        return ready

    def _sum(self, full: Tensor, out: Tensor, ready: _Round, *, accumulate: bool) -> None:
        """Adds up this rank's part over the ranks, in a fixed order."""
        own = self._part(full, self._rank)
        terms = [self.segments.view(peer, ready.hear(peer), own) for peer in self._peers]
        ready.end()
        add_terms(own, terms, out, accumulate=accumulate)

    def _copy(self, targets: dict[int, Tensor], ready: _Round) -> None:
        for peer, target in targets.items():
            target.copy_(self.segments.view(peer, ready.hear(peer), target))
        ready.end()

    def _round(self, peers: Sequence[int]) -> _Round:
        return _Round(self._messenger, peers)

    def _place(self, part: Tensor) -> tuple[int, int]:
        place = self.segments.locate(part)
        if place is None:
            raise EngineError("a buffer that was not made by Collectives.zeros was exchanged")
        return place

    def _part(self, full: Tensor, rank: int) -> Tensor:
        return part_of(full, rank, len(self._peers) + 1)


def add_terms(own: Tensor, terms: Sequence[Tensor], out: Tensor, *, accumulate: bool) -> None:
    """Sums this rank's term and the others' into `out`, which may be `own`, in the order given.

    This rank's comes first, so that its memory can hold the running sum.
    """
    if accumulate:
        out.add_(own)
    elif terms:
        torch.add(own, terms[0], out=out)
        terms = terms[1:]
    for term in terms:
        out.add_(term)


def find_neighbours(messenger: Messenger, group: dist.ProcessGroup) -> Neighbours | None:
    """Shared memory with all the other ranks, if every one of them can read every other's.

    Collective. The ranks agree: either all of them get an answer, or none.
    """
    probe = Probe()
    try:
        card = torch.tensor([probe.pid, probe.descriptor, probe.secret], dtype=torch.int64)
        cards = [torch.empty_like(card) for _ in range(messenger.world_size)]
        dist.all_gather(cards, card, group=group)
        readable = all(Probe.readable(*other.tolist()) for other in cards)
        agreed = torch.tensor(int(readable))
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    finally:
        probe.close()
    if not agreed.item():
        return None
    return Neighbours(messenger, Segments([int(other[0]) for other in cards]))
