"""Copies a step's state into a slot, commits it, and posts what depends on it.

Where every operation has run when it returns, as on a CPU, all of this happens within `write`. On
an asynchronous device the copies run during the next forward and backward. The order for step k
there, where T is the training thread, C its stream, M the copies' own stream, and H the thread
`rayzero-mirror`:

1. T has passed vote k and enqueued update k on C. It invalidates the slot's version, lets M wait
   for C, enqueues the copies on M with an event behind each group, and continues.
2. C waits for the copies of what forward and backward change: buffers, residuals. These are first.
3. H copies what is in host memory, and waits for the events; a group's checksum is computed while
   the next ones are copied.
4. When an event is reached, H looks at the interrupt, which is set before collectives are aborted.
   If it is not set, no abort has released what the copies waited for, and they are genuine.
5. H commits the version, then orders its copies on other nodes, then posts the messages of the
   step: `Pinned`, the report.
6. T waits for H in `settle`, before it enters vote k + 1. C waits for M's last event before update
   k + 1, or another write of the state (`TrainingState.before_write`).

So a step's mirror is complete before the step is reported, and before the next vote. A mirror that
ends otherwise is never committed or posted: an interrupt ends H's wait; `settle` raises H's errors
in T; `close`, at the end of the generation, waits a few times as long as the longest commit. The
slot then holds no version, and is not reused before its copies are done (`SlotMapping.is_busy`). A
vault that died is noticed by the next `reserve`. A drain and a function that returns call `settle`.

Rule of ordering: `mirror-first` (docs/engine.md).
"""

from __future__ import annotations

import logging
import mmap
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import ceil, inf
from queue import SimpleQueue
from threading import Event as Flag
from threading import Lock, Thread
from time import perf_counter

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from rayzero.engine.device import Device, Event
from rayzero.engine.state.composite import CompositeState
from rayzero.engine.state.ranges import StateBlock, StateRange
from rayzero.workers.messages import WorkerMessage
from rayzero.workers.training_thread import StopFlag
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.slots import (
    CHUNK_BYTES,
    SlotChecksums,
    SlotWriter,
    chunk_spans,
    combine_checksums,
)

log = logging.getLogger("rayzero.workers")

MIRROR_COST_FRACTION = 0.05
"""The fraction of training time that mirrors may cost, if their interval is automatic."""
SMOOTHING_FACTOR = 0.2
_REMEASURE_STEPS = 200
_POLL_S = 0.001
_CHECKSUM_THREADS = 4
_SLOWEST_BYTES_PER_S = 0.5e9
"""The assumed speed of a commit, until one was measured."""


@dataclass(frozen=True)
class SlotWrite:
    """One mirror to write.

    Args:
        constants: whether to write the state's constants, which the slot does not have yet.
        metadata: encodes the metadata of `step`.
        pin, keep: as in `SlotWriter.commit`.
        on_commit: called once the slot is committed.
    """

    slot: SlotWriter
    block: StateBlock
    constants: bool
    step: int
    metadata: Callable[[], bytes]
    pin: bool
    keep: bool
    on_commit: Callable[[], None]


@dataclass
class _Job:
    """One step, from its launch until it is settled.

    Attributes:
        write: None for a step without a mirror.
        groups: the slot's data up to each offset is complete when the event is reached and
            `on_host` is copied.
        abortable: an abort may have changed the copied state.
        on_host: the parts of the state in host memory, with their targets.
        messages: held back until the step turns out to be `genuine`.
    """

    write: SlotWrite | None
    state: CompositeState
    groups: list[tuple[int, Event]]
    abortable: bool
    on_host: list[tuple[StateRange, Tensor]] = field(default_factory=list)
    host_copied: Flag = field(default_factory=Flag)
    lock: Lock = field(default_factory=Lock)  # guards the two below
    messages: list[WorkerMessage] = field(default_factory=list)
    genuine: bool = False
    error: BaseException | None = None
    done: Flag = field(default_factory=Flag)

    def before_write(self, device: Device) -> None:
        """Makes the device wait for its copies. The host waits only for the copies from host
        memory, which H makes first."""
        if self.on_host:
            self.host_copied.wait()
        device.current_stream().wait_event(self.groups[-1][1])


class StateCopier:
    """Copies the state of one device. The state of an asynchronous device is copied on a stream of
    its own, and committed in a thread that `close` ends; any other in the training thread. Used by
    the training thread.

    Args:
        interrupt: set before collectives are aborted.
        send: posts a message; any thread may call it.
    """

    def __init__(self, interrupt: StopFlag, send: Callable[[WorkerMessage], None]) -> None:
        self.cost = CopyCost()
        self.interrupt = interrupt
        self._send = send
        self._device = Device(torch.device("cpu"))  # until `begin`
        self._stream = self._device.new_stream()
        self._job: _Job | None = None  # not settled yet
        self._closing = Flag()
        self._longest_s = 0.0
        self._checksums = ThreadPoolExecutor(_CHECKSUM_THREADS, "rayzero-checksum")
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: Thread | None = None

    def begin(self, device: Device) -> None:
        """Sets the device of the state to copy, before the first copy. Later calls do nothing."""
        if device.asynchronous and self._thread is None:
            self._device = device
            self._stream = device.new_stream()
            self.cost.beside = True
            self._thread = Thread(target=self._serve, name="rayzero-mirror", daemon=True)
            self._thread.start()

    def register(self, vault: VaultClient, slot: SlotWriter) -> None:
        """Prepares a reserved slot for copies from the device."""

        def register(memory: mmap.mmap) -> Callable[[], None]:
            pinned = torch.frombuffer(memory, dtype=torch.uint8)
            self._device.register_host(pinned)
            return lambda: self._device.unregister_host(pinned)

        if self._device.asynchronous:
            vault.register(slot.mapping, register)

    def write(self, write: SlotWrite, state: CompositeState) -> None:
        """Copies and commits the state of a finished step. A copy that an abort may have changed is
        not committed; then this method or `settle` raises what the interrupt raises."""
        write.slot.begin()
        targets = [*write.block.targets(write.slot.data, constants=write.constants)]
        groups: list[tuple[int, Event]] = []
        on_host: list[tuple[StateRange, Tensor]] = []
        grouped = 0  # bytes of the slot that are in groups
        compute = self._device.current_stream()
        self._stream.wait_stream(compute)
        with self._device.use_stream(self._stream):
            for part, target, _ in targets:
                if part.volatile:
                    target.copy_(part.memory, non_blocking=True)
            compute.wait_event(self._device.record_event())
            for part, target, stop in targets:
                if part.memory.device != self._device.torch_device:
                    on_host.append((part, target))
                elif not part.volatile:
                    target.copy_(part.memory, non_blocking=True)
                if stop - grouped >= CHUNK_BYTES:
                    groups.append((stop, self._device.record_event()))
                    grouped = stop
            last = self._device.record_event()
        groups.append((len(write.slot.data), last))
        write.slot.mapping.is_busy = lambda: not last.query()
        self._longest_s = self._longest_s or write.block.index.nbytes / _SLOWEST_BYTES_PER_S
        self._start(write, state, groups, on_host)

    def confirm(self, state: CompositeState) -> None:
        """Ends a step without a mirror. Checks the interrupt as `write` does."""
        self._start(None, state, [(0, self._device.record_event())], [])

    def post(self, message: WorkerMessage) -> None:
        """Posts a message of the step that was last written or confirmed, once that is done."""
        if (job := self._job) is None:
            self._send(message)
            return
        with job.lock:
            if job.genuine:
                self._send(message)
            else:
                job.messages.append(message)

    def settle(self) -> None:
        """Returns when the last step is committed and its messages are posted. Raises the error
        that prevented it."""
        if (job := self._job) is None:
            return
        while not job.done.wait(_POLL_S):
            self.interrupt.check()
        if job.error is not None:
            raise job.error
        if not job.genuine:
            self.interrupt.check()
        self._job = None

    def close(self) -> None:
        """Abandons a mirror that is not settled in time. Raises nothing."""
        limit_s = 1.0 + 4 * self._longest_s
        job = self._job
        if job is not None and not job.done.wait(limit_s):
            log.warning("a mirror was given up: its copies have not ended after %.1f s", limit_s)
        elif job is not None and job.error is not None:
            log.warning("the mirror of the last step failed: %s", job.error)
        self._closing.set()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(limit_s)
        self._checksums.shutdown(wait=False)

    def _start(
        self,
        write: SlotWrite | None,
        state: CompositeState,
        groups: list[tuple[int, Event]],
        on_host: list[tuple[StateRange, Tensor]],
    ) -> None:
        self.settle()
        abortable = self._device.asynchronous or state.update_is_collective
        job = self._job = _Job(write, state, groups, abortable, on_host)
        if self._thread is not None:
            state.copied_by = job
            self._jobs.put(job)
        else:
            self._run(job)
            self.settle()

    # The methods below run in the thread `rayzero-mirror`, if there is one.

    def _serve(self) -> None:
        self._device.make_current()
        while (job := self._jobs.get()) is not None:
            self._run(job)

    def _run(self, job: _Job) -> None:
        started = perf_counter()
        try:
            self._complete(job)
        except BaseException as error:  # noqa: BLE001  raised by `settle`
            job.error = error
        job.host_copied.set()
        self._longest_s = max(self._longest_s, perf_counter() - started)
        job.done.set()

    def _complete(self, job: _Job) -> None:
        """Commits and posts, unless the job is interrupted before its copies are done."""
        write = job.write
        parts = [] if write is None else _checksum_parts(write)
        spans = deque(span for part in parts for span in part)
        checksums: list[Future[int]] = []
        with torch.no_grad():
            for state_range, target in job.on_host:
                target.copy_(state_range.memory)
        job.host_copied.set()
        for stop, event in job.groups:
            if not self._is_reached(event, job):
                return
            while write is not None and spans and spans[0].stop <= stop:
                chunk = write.slot.data[spans.popleft()]
                checksums.append(self._checksums.submit(xxh3_64_intdigest, chunk))
        job.state.confirm()
        if write is not None:
            with self._device.use_stream(self._stream):  # with no work queued before its reads
                metadata = write.metadata()
            digests = deque(future.result() for future in checksums)
            combined = [combine_checksums([digests.popleft() for _ in part]) for part in parts]
            if write.constants:
                write.slot.constants_checksum = combined.pop(0)
            weights, rest = combined
            sums = SlotChecksums(weights, rest)
            write.slot.commit(write.step, metadata, write.pin, sums, write.keep)
            write.on_commit()
        with job.lock:
            job.genuine = True
            for message in job.messages:
                self._send(message)

    def _is_reached(self, event: Event, job: _Job) -> bool:
        """Waits for a copy. Returns False if an abort may have released it, or it was given up."""
        while not event.query():
            if self.interrupt.wait(_POLL_S) or self._closing.is_set():
                return False
        return not (job.abortable and self.interrupt.is_set())


def _checksum_parts(write: SlotWrite) -> list[list[slice]]:
    """Returns the chunks of each part of the slot that has a checksum: the constants, if they are
    written, the weights, and the rest."""
    slot = write.slot
    parts = [
        chunk_spans(0, slot.constant_bytes),
        chunk_spans(slot.constant_bytes, slot.weight_bytes),
        chunk_spans(slot.weight_bytes, len(slot.data)),
    ]
    return parts if write.constants else parts[1:]


class CopyCost:
    """The cost of mirroring for training, and the interval that bounds it. Durations are smoothed.

    A mirror that training waits for costs its duration, including its checksum. A mirror that runs
    `beside` the next step costs the time by which that step is longer than a step without a mirror,
    including the wait for the commit.
    """

    def __init__(self, *, beside: bool = False) -> None:
        self.beside = beside
        self._step_s = 0.0  # with `beside`, of a step without a mirror
        self._mirrored_step_s = 0.0
        self._mirror_s = 0.0
        self._warmup_steps = 2
        self._unmirrored_age = _REMEASURE_STEPS  # steps since the last one without a mirror
        self._last_step_at_s = perf_counter()

    @property
    def interval_steps(self) -> float:
        """Steps between two mirrors that keep their cost within `MIRROR_COST_FRACTION`; 2 while
        steps with and without a mirror are still to be measured."""
        is_measured = self._unmirrored_age < _REMEASURE_STEPS and self._mirrored_step_s
        if self.beside and not is_measured:
            return 2.0
        if not self._mirror_s or not self._step_s:
            return 1.0
        return float(max(1, ceil(self._mirror_s / (MIRROR_COST_FRACTION * self._step_s) - 0.25)))

    def step_finished(self, mirrored: bool | None) -> None:
        """Called when a step has ended. `mirrored`: whether the step before was mirrored; None: it
        was, into a new slot, which is slower."""
        now = perf_counter()
        took_s, self._last_step_at_s = now - self._last_step_at_s, now
        self._unmirrored_age += 1
        if not self.beside:
            self._step_s = smooth(self._step_s, took_s, limit=2)
            return
        if self._warmup_steps > 0:
            self._warmup_steps -= 1
        elif mirrored:
            self._mirrored_step_s = smooth(self._mirrored_step_s, took_s, limit=2)
        elif mirrored is False:
            self._unmirrored_age = 0
            self._step_s = smooth(self._step_s, took_s, limit=2)
        if self._step_s and self._mirrored_step_s:
            self._mirror_s = max(0.0, self._mirrored_step_s - self._step_s)

    def mirror_finished(self, stopped_s: float) -> None:
        """Called when a mirror into a used slot has stopped training for so long."""
        if not self.beside:
            self._mirror_s = smooth(self._mirror_s, stopped_s)


def smooth(before: float, now: float, *, limit: float = inf) -> float:
    """Returns an exponential moving average; `now` if there is no value before. A value counts as
    at most `limit` times the average, so that an evaluation between two steps hardly counts."""
    return before + SMOOTHING_FACTOR * (min(now, limit * before) - before) if before else now
