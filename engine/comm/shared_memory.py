"""Exchanges between ranks on one host through shared memory. gloo sends tokens only.

TCP on loopback copies every byte four times. Here a reduction reads the peers' buffers in place,
and a gather is one copy. Each exchange has two messages per peer: *ready* says where to read,
*done* says that it has been read.

Order. Exchanges run in launch order, and waiting for one runs all before it. So a rank that waits
has done its share of everything its peers may be waiting for, and no cycle can form. `drain` runs
the remaining ones before any other collective. `progress_pending` does so before returning to the
script, which may call collectives itself. Peers may read a buffer until its exchange was released
or drained. Waiting for that only before the buffer is overwritten saves a barrier per exchange.

Memory. A segment is an anonymous file (memfd_create(2)), so no name can be left behind. A peer
opens it as /proc/<pid>/fd/<fd>, which requires the same user and process namespace. Its memory is
freed when the last process unmaps it.

Lifetime. Exchanges and backend refer to each other, and messages keep gloo's connections alive. A
re-cut `abandon`s exchanges and messages. By then its host has shut down the connections and aborted
the group, and the group's threads have ended, so nothing is read or written any more. A segment
ends with the last tensor in it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rayzero.engine.comm.backend import Work, copy_unless_same
from rayzero.engine.comm.gloo import GlooBackend, sum_terms
from rayzero.engine.comm.gloo_p2p import P2PChannel, P2PWork
from rayzero.engine.errors import EngineError

MAX_UNREAD = 64
SEGMENT_BYTES = 8 << 20  # small buffers share a segment, or descriptors would run out
ALIGN_BYTES = 128


class _TokenRound:
    """One message to and from each peer, which may contain a location to read from.

    Sends are not waited for. If the peer has just closed the connection, the wait would last until
    the group's timeout, because gloo (torch 2.13) does not end sends whose write has failed.
    """

    def __init__(self, channel: P2PChannel, peers: Iterable[int]) -> None:
        self._channel = channel
        self._tag = tag = channel.next_tag()
        self._locations = {peer: torch.empty(2, dtype=torch.int64) for peer in peers}
        self._receives = {
            peer: channel.recv(location, peer, tag) for peer, location in self._locations.items()
        }
        self._sends: list[P2PWork] = []

    def send(self, peer: int, location: tuple[int, int] = (0, 0)) -> None:
        token = torch.tensor(location, dtype=torch.int64)
        self._sends.append(self._channel.send(token, peer, self._tag))

    def send_all(self) -> None:
        """Sends tokens without a location."""
        for peer in self._locations:
            self.send(peer)

    def recv(self, peer: int) -> tuple[int, int]:
        """Waits for the peer's message. Called once, because a second wait would never return."""
        self._receives.pop(peer).wait()
        descriptor, offset = self._locations[peer].tolist()
        return descriptor, offset

    def finish(self) -> None:
        """Waits for messages that have not been received. Sent messages are known to have been
        received by the peers."""
        while self._receives:
            self._receives.popitem()[1].wait()
        self._channel.in_flight.difference_update(self._sends)


_Steps = Iterator[Sequence[_TokenRound]]
"""The steps of an exchange. The first one announces this rank's part, and yields the exchange's
rounds except *done*."""


class _Exchange(Work):
    """A collective in shared memory. `execute` runs once, in launch order."""

    def __init__(
        self, backend: SharedMemoryBackend, steps: _Steps, rounds: Sequence[_TokenRound]
    ) -> None:
        self._backend = backend
        self._steps = steps
        self._rounds = rounds
        self.finished = False

    def wait(self) -> None:
        self._backend.execute_until(self)

    def release(self) -> None:
        """Waits for the peers' *done*. A peer that has sent it has received this rank's other
        messages. This rank's *done* need not be waited for: the peer expects it, and few messages
        can be unread before it, so the kernel has taken it at once."""
        self.wait()
        for tokens in reversed(self._rounds):
            tokens.finish()

    def execute(self) -> None:
        for _ in self._steps:
            pass
        self._rounds[-1].send_all()
        self.finished = True


class SharedMemoryBackend(GlooBackend):
    """The backend of ranks on one host. Buffers lie in segments that all ranks can read."""

    def __init__(self, group: dist.ProcessGroup, segments: ShmSegments) -> None:
        super().__init__(group)
        self._segments = segments
        self._queued: deque[_Exchange] = deque()
        # Exchanges whose buffers may not have been read by all peers, oldest first.
        self._not_yet_read: deque[_Exchange] = deque()

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._segments.zeros(numel, dtype)

    def all_reduce(self, full: Tensor) -> Work:
        if self._segments.locate(full) is None:  # a few numbers
            self.drain()
            return super().all_reduce(full)
        return self._launch(self._all_reduce_steps(full), self.peers)

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool) -> Work:
        return self._launch(self._reduce_scatter_steps(full, out, accumulate), self.peers)

    def _copy_parts(self, sent: dict[int, Tensor], received: dict[int, Tensor]) -> Work:
        peers = [peer for peer in self.peers if peer in sent]
        return self._launch(self._copy_steps(sent, received), peers)

    def _post_messages(self, receive: dict[int, Tensor], send: dict[int, Tensor]) -> list[P2PWork]:
        self.drain()
        return super()._post_messages(receive, send)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        self.drain()
        return super().broadcast(tensor, source)

    def progress_pending(self) -> None:
        while self._queued:
            self._queued.popleft().execute()

    def drain(self) -> None:
        """Runs all launched exchanges, and waits until all peers have read this rank's buffers."""
        self.progress_pending()
        while self._not_yet_read:
            self._not_yet_read.popleft().release()

    def abandon(self) -> None:
        self._queued.clear()
        self._not_yet_read.clear()
        super().abandon()

    def execute_until(self, exchange: _Exchange) -> None:
        while not exchange.finished:
            if not self._queued:  # the exchange has started, and failed
                raise RuntimeError("an earlier exchange failed")
            self._queued.popleft().execute()

    def _launch(self, steps: _Steps, peers: Sequence[int]) -> Work:
        """Starts an exchange: announces this rank's part, and queues the remaining steps."""
        rounds = next(steps)
        exchange = _Exchange(self, steps, (*rounds, _TokenRound(self.channel, peers)))
        self._queued.append(exchange)
        self._not_yet_read.append(exchange)
        # An evaluation gathers weights repeatedly without a vote in between. A peer that waits
        # anywhere has done its share of all earlier exchanges, so this wait ends.
        while len(self._not_yet_read) > MAX_UNREAD and self._not_yet_read[0].finished:
            self._not_yet_read.popleft().release()
        return exchange

    def _reduce_scatter_steps(self, full: Tensor, out: Tensor, accumulate: bool) -> _Steps:
        parts = self.chunks(full)
        own = parts.pop(self.rank)
        ready = self._send_locations(parts)
        yield (ready,)
        self._sum_chunk(own, out, ready, accumulate=accumulate)

    def _copy_steps(self, sent: dict[int, Tensor], received: dict[int, Tensor]) -> _Steps:
        own = sent.pop(self.rank)
        ready = self._send_locations(sent)
        copy_unless_same(received.pop(self.rank), own)
        yield (ready,)
        self._copy_chunks(received, ready)

    def _all_reduce_steps(self, full: Tensor) -> _Steps:
        """Reduce-scatters, then all-gathers. A peer's part of `full` is overwritten only after the
        peer has announced its sum. The peer has read the part by then."""
        parts = self.chunks(full)
        own = parts.pop(self.rank)
        ready, summed = self._send_locations(parts), _TokenRound(self.channel, parts)
        yield ready, summed
        self._sum_chunk(own, own, ready, accumulate=False)
        for peer in parts:
            summed.send(peer, self._location(own))
        self._copy_chunks(parts, summed)

    def _send_locations(self, parts: dict[int, Tensor]) -> _TokenRound:
        """Announces to each peer where to read its part."""
        ready = _TokenRound(self.channel, parts)
        for peer, part in parts.items():
            ready.send(peer, self._location(part))
        return ready

    def _sum_chunk(self, own: Tensor, out: Tensor, ready: _TokenRound, *, accumulate: bool) -> None:
        """Sums this rank's part over the ranks, in a fixed order."""
        terms = [self._segments.view(peer, ready.recv(peer), own) for peer in self.peers]
        sum_terms(own, terms, out, accumulate=accumulate)

    def _copy_chunks(self, targets: dict[int, Tensor], ready: _TokenRound) -> None:
        for peer, target in targets.items():
            target.copy_(self._segments.view(peer, ready.recv(peer), target))

    def _location(self, part: Tensor) -> tuple[int, int]:
        location = self._segments.locate(part)
        if location is None:
            raise EngineError("a buffer that was not made by Collectives.zeros was exchanged")
        return location


def make_gloo_backend(group: dist.ProcessGroup, *, share_memory: bool) -> GlooBackend:
    """Returns a backend that uses shared memory if `share_memory` and all ranks can read each
    other's memory. Otherwise returns, on all ranks, one that sends messages. Collective."""
    pids = _shared_memory_pids(group) if share_memory else None
    return GlooBackend(group) if pids is None else SharedMemoryBackend(group, ShmSegments(pids))


def _shared_memory_pids(group: dist.ProcessGroup) -> list[int] | None:
    """Returns every rank's process id. Returns None on all ranks if a rank cannot read another
    rank's memory."""
    secret = secrets.randbits(62)
    descriptor = make_probe(secret)
    try:
        own_probe = torch.tensor([os.getpid(), descriptor, secret], dtype=torch.int64)
        probes = [torch.empty_like(own_probe) for _ in range(dist.get_world_size(group))]
        dist.all_gather(probes, own_probe, group=group)
        readable = all(is_readable(*probe.tolist()) for probe in probes)
        agreed = torch.tensor(int(readable))
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    finally:
        os.close(descriptor)
    return [int(probe[0]) for probe in probes] if agreed.item() else None


class ShmSegments:
    """This rank's segments, and the peers' segments that it has mapped.

    Segments live as long as this object. They contain the buffers of one engine.

    Attributes:
        pids: every rank's process id, by rank.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = pids
        self._locations: dict[int, tuple[int, int]] = {}  # (descriptor, offset) by address
        self._peer_maps: dict[tuple[int, int], mmap.mmap] = {}  # by (rank, the rank's descriptor)
        self._segments: list[tuple[int, mmap.mmap]] = []  # the last one is being filled
        self._used_bytes = 0

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a flat tensor of zeros that peers can read. Raises EngineError if the system has
        not enough shared memory."""
        size = max(1, numel * dtype.itemsize)
        if not self._segments or self._used_bytes + size > len(self._segments[-1][1]):
            self._segments.append(_make_segment(max(size, SEGMENT_BYTES)))
            self._used_bytes = 0
        descriptor, memory = self._segments[-1]
        tensor = torch.frombuffer(memory, dtype=dtype, count=numel, offset=self._used_bytes)
        self._locations[tensor.untyped_storage().data_ptr()] = descriptor, self._used_bytes
        self._used_bytes += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        return tensor

    def locate(self, tensor: Tensor) -> tuple[int, int] | None:
        """Returns (file descriptor, offset in bytes) of a tensor, or None if it is not shared."""
        location = self._locations.get(tensor.untyped_storage().data_ptr())
        if location is None:
            return None
        return location[0], location[1] + int(tensor.storage_offset()) * tensor.element_size()

    def view(self, rank: int, location: tuple[int, int], like: Tensor) -> Tensor:
        """Returns a view of another rank's memory at a location, with the length and dtype of
        `like`. Raises RuntimeError if that rank's process has ended, as a lost connection does."""
        descriptor, offset = location
        key = rank, descriptor
        if key not in self._peer_maps:
            try:
                self._peer_maps[key] = _map_segment(self.pids[rank], descriptor)
            except OSError as error:
                raise RuntimeError(
                    f"the shared memory of rank {rank} cannot be read: {error.strerror}"
                ) from error
        return torch.frombuffer(
            self._peer_maps[key], dtype=like.dtype, count=like.numel(), offset=offset
        )

    def close(self) -> None:
        """Closes the descriptors. The memory is freed when no tensor uses it any more."""
        for descriptor, _ in self._segments:
            os.close(descriptor)
        self._segments.clear()
        self._locations.clear()
        self._peer_maps.clear()

    def __del__(self) -> None:
        self.close()


def make_probe(secret: int) -> int:
    """Returns the descriptor of a new segment with a secret. A rank that can read the secret shares
    memory with this one."""
    descriptor = os.memfd_create("rayzero-probe")
    os.write(descriptor, secret.to_bytes(8, sys.byteorder))
    return descriptor


def is_readable(pid: int, descriptor: int, secret: int) -> bool:
    """Returns whether this rank can read the probe of the rank with that process id."""
    try:
        with _map_segment(pid, descriptor) as memory:
            return int.from_bytes(memory[:8], sys.byteorder) == secret
    except (OSError, ValueError):
        return False


def _make_segment(size: int) -> tuple[int, mmap.mmap]:
    descriptor = os.memfd_create("rayzero")
    try:
        os.posix_fallocate(descriptor, 0, size)  # fails here instead of by SIGBUS at first access
        return descriptor, mmap.mmap(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        raise EngineError(
            f"{size} bytes of shared memory could not be allocated: {error.strerror}",
            fix="raise the memory limit of this machine or container, or set "
            "RAYZERO_SHARED_MEMORY=0 to exchange over TCP",
        ) from None


def _map_segment(pid: int, descriptor: int) -> mmap.mmap:
    # Writable only because torch warns about tensors over read-only memory.
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(opened, 0)
    finally:
        os.close(opened)
