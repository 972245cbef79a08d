"""A worker's process, without Ray: executes the controller's commands."""

from __future__ import annotations

import os
import pickle
import resource
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from threading import Thread, Timer
from typing import Any, NoReturn

import torch

from rayzero.engine.comm.elastic_group import calls_of
from rayzero.engine.device import get_device
from rayzero.engine.errors import ConfigError, EngineError, RayzeroError
from rayzero.engine.session import use_session
from rayzero.workers import process_group
from rayzero.workers.calls import WorkerCalls
from rayzero.workers.chaos.inject import FaultRecord, FaultSchedule, WorkerFaultInjector
from rayzero.workers.chaos.spec import FaultSpec
from rayzero.workers.context import Context
from rayzero.workers.entrypoint import TrainFunction, call_function, load_train_function
from rayzero.workers.function_collectives import FunctionCollectives, read_calls
from rayzero.workers.function_result import encode_result
from rayzero.workers.membership import Membership
from rayzero.workers.messages import (
    Assignment,
    Crashed,
    Finished,
    GenerationSpec,
    InProcessStateInfo,
    Joined,
    Left,
    Notes,
    RankAssignment,
    WorkerInfo,
    WorkerMessage,
    WorkerSpec,
)
from rayzero.workers.nccl_settings import apply_nccl_settings, contradictions
from rayzero.workers.rendezvous_store import StoreServer
from rayzero.workers.retained_state import RetainedState
from rayzero.workers.session import JobSession
from rayzero.workers.stacks import Stacks, read_stacks
from rayzero.workers.training_thread import GenerationChannel, TrainingThread
from rayzero.workers.user_process import UserProcess
from rayzero.workers.vault.records import SlotInfo
from rayzero.workers.worker_status import GenerationRecord, WorkerStatus

FENCE_INTERVAL_S = 0.1
"""Seconds between two aborts of a fenced generation's waits, until its training thread has left."""
DEVICE_EXIT_S = 10.0
"""How long a process whose device is unusable waits for the controller to kill it, before it ends
itself. The controller has the process's report by then."""
DEVICE_EXIT_CODE = 70
"""The exit code of a process that ended itself: EX_SOFTWARE."""


class WorkerProcess(UserProcess, WorkerCalls):
    """One worker process. Its methods are called by the command threads; none of them waits long
    for the training thread, so the worker always answers.

    Output tees and outbox live as long as the process, session and context for one call of the
    training function, a channel for one generation.
    """

    def __init__(self, spec: WorkerSpec, index: int) -> None:
        super().__init__(spec)
        apply_nccl_settings(os.environ)
        self._device = torch.device("cpu")  # until the first generation
        # Half of the time after which a rank that is silent counts as hung, and is killed.
        self._device_timeout_s = spec.patience_s / 2
        self._retained = RetainedState(index, self._device_timeout_s)
        self._fault_schedule = FaultSchedule(FaultRecord(spec.output_dir), self._outbox.post)
        self._training_thread = TrainingThread(on_left=self._on_left)
        self._channel = self._new_channel(generation=0, rank=index)
        self._record = GenerationRecord()
        self._session: JobSession | None = None  # of the running call of the training function
        self._notes: Notes | None = None  # of that function, once it has ended
        self._error_polling = ExitStack()  # of the process group
        self._train_function: TrainFunction | None = None
        self._store: StoreServer | None = None
        self.node_address = "127.0.0.1"
        """The address on which the store listens."""
        self.begin_output()

    def open_store(self) -> int:
        """Begins to serve a store, in place of the previous one; returns its port."""
        if self._store is not None:
            self._store.close()
        self._store = StoreServer(self.node_address, self._collective_timeout_s)
        return self._store.port

    def warm_up(self) -> None:
        """Runs slow first-time initialization, so that no peer waits for it in a generation. A
        mistake in the job file or the user's module is reported when the first generation needs
        it; a device that fails here fails the start, which is tried again later."""
        with suppress(ConfigError):
            self._train_function = load_train_function(self._spec.entrypoint, self._spec.args)
        with suppress(ConfigError):
            process_group.warm_up_torch(self._select_device())
        if self._spec.gpus:
            for setting, seen in contradictions(os.environ):
                text = f"{seen} is set, not {setting.value}: {setting.otherwise}"
                self._post_log("stderr", text)

    def assign(self, generation: GenerationSpec, member: RankAssignment) -> None:
        assignment = Assignment(**vars(member), **vars(generation))
        self._record.assign(assignment)
        channel = self._new_channel(assignment.generation, assignment.rank)
        with process_group.group_lock:
            self._channel = channel
        if not (assignment.survivors_stay and self._training_thread.resume(assignment, channel)):
            body = partial(self._run_function, assignment, channel)
            self._training_thread.start(channel, body, ahead=assignment.is_ahead)

    def poll(self, timeout_s: float) -> list[WorkerMessage]:
        """Returns the messages since the last poll, then a heartbeat. Waits for a message."""
        return [*self._outbox.poll(timeout_s), self._training_thread.heartbeat(self._channel)]

    def status(self, info: WorkerInfo, group: str) -> WorkerStatus:
        channel = self._channel
        leaving = (channel.interrupt.is_set(), channel.drain.is_set(), channel.ending)
        return self._record.status(info, group, any(leaving))

    @property
    def members(self) -> tuple[WorkerInfo, ...]:
        return self._record.members

    def stop(self, generation: int) -> None:
        channel = self._channel
        if channel.generation == generation:
            channel.interrupt.set()
            if channel.sockets.is_recording:  # it waits for peers to join
                self._begin_abort(channel)

    def end(self, generation: int) -> None:
        if self._channel.generation == generation:
            self._channel.ending = True

    def drain(self, generation: int) -> None:
        if self._channel.generation == generation:
            self._channel.drain.set()

    def divide(self, generation: int, shares: Sequence[float]) -> None:
        if self._channel.generation == generation:
            self._channel.new_shares = tuple(shares)

    def fence(self, generation: int) -> None:
        channel = self._channel
        if channel.generation != generation:
            return
        session = self._session
        if session is not None and session.outlives_generation and not channel.ending:
            channel.reforming = True  # before the interrupt, so that the function is not given up
        channel.interrupt.set()
        with process_group.group_lock:  # a command may assign the next generation concurrently
            if session is not None and channel.reforming and self._channel is channel:
                session.break_group("the generation was ended")
        self._begin_abort(channel)

    def _begin_abort(self, channel: GenerationChannel) -> None:
        """Aborts the generation's waits for peers, in a thread that runs until the training thread
        has left. If that never leaves, the hang detector kills the process."""
        if channel.fenced:
            return
        channel.fenced = True
        fencing = Thread(target=self._abort_waits, args=[channel], name="rayzero-fence")
        fencing.daemon = True  # a function in native code may never return
        fencing.start()

    def _abort_waits(self, channel: GenerationChannel) -> None:
        """Aborts until the training thread has left, which may be about to start a wait for peers,
        now or after a long call."""
        while True:
            with process_group.group_lock:
                if self._channel is not channel:
                    return
                process_group.interrupt_collectives(self._device, channel.sockets)
            if channel.left.wait(FENCE_INTERVAL_S):
                return

    def end_group(self, channel: GenerationChannel, reason: str) -> None:
        """See `SessionHost`. The controller may have ended the generation before."""
        channel.reforming = True
        if not channel.interrupt.is_set():
            channel.interrupt.fail(reason)
        self._begin_abort(channel)

    def await_next(self, *, drained: bool, keeps_rank: bool, notes: Notes | None) -> Membership:
        """See `SessionHost`."""
        self._error_polling.close()
        self._notes = notes
        following = self._training_thread.park(drained=drained, keeps_rank=keeps_rank)
        self._notes = None
        return self._enter(*following, continues=True)

    def await_begin(self) -> Membership:
        """See `SessionHost`."""
        return self._enter(*self._training_thread.await_begin())

    def inject(self, faults: Sequence[FaultSpec]) -> None:
        self._fault_schedule.set_faults((*self._spec.faults, *faults))

    def salvage(self, vault: str, step: int) -> SlotInfo:
        if not self._channel.left.is_set():
            raise EngineError(
                "the training function is still running, so its state cannot be salvaged"
            )
        try:
            return self._retained.salvage(vault, step)
        except RayzeroError:
            raise
        except Exception as error:  # of torch, if the device has failed since, or of user code
            raise EngineError(f"the state in memory cannot be copied: {error}") from error

    def dump_stack(self) -> Stacks:
        return replace(read_stacks(), beat=self._training_thread.heartbeat(self._channel))

    def _enter(
        self, assignment: Assignment, channel: GenerationChannel, *, continues: bool = False
    ) -> Membership:
        """Begins a generation; `continues`: with the engines of the previous one. A generation that
        has not begun yet is only made known to torch."""
        device = self._device
        self.inject(assignment.faults)
        injector = WorkerFaultInjector(self._fault_schedule, assignment.rank)
        if assignment.is_ahead:
            channel.progress.enter_phase("start")
            self._retained.begin_generation(assignment)  # the vault detects this process's death
            process_group.plan_process_group(assignment, device, self._begin)
            return Membership(assignment, channel, injector)
        step = 1 + (assignment.restore.step if assignment.restore else 0)
        channel.progress.enter_phase("join")
        injector.on_phase("join", step)
        # After a return or a drain the previous generation's group still exists. This ends first
        # the group, then the work queued on the device, then the previous engine, before a new
        # group needs their memory.
        process_group.abort_default_group(device, channel.sockets)
        get_device(device).synchronize(self._device_timeout_s)
        # Before joining: the vault must detect a death during rendezvous, too.
        self._retained.begin_generation(assignment)
        if not continues:
            channel.interrupt.check()
        process_group.plan_process_group(assignment, device)
        return Membership(assignment, channel, injector, partial(self._join, assignment, channel))

    def _join(self, assignment: Assignment, channel: GenerationChannel) -> None:
        """Joins the process group of a generation."""
        if self._store is not None and self._store.port == assignment.store_port:
            self._store.admit(assignment.secret)
        process_group.join_process_group(
            assignment, self._device, self._collective_timeout_s, channel.sockets
        )
        channel.post(Joined(assignment.generation, assignment.rank))
        channel.progress.begin_step(1 + (assignment.restore.step if assignment.restore else 0))
        self._error_polling.enter_context(self._polled_errors(channel))

    def _begin(self) -> None:
        if self._session is not None:
            self._session.begin()

    def _read_calls(self) -> dict[str, Any] | None:
        """Reads what the first function's collectives returned: see `FunctionCollectives`."""
        session = self._session
        if session is None:
            return None
        with session.open_source() as source:
            return None if source is None else read_calls(source, session.assignment.rank)

    def _run_function(self, assignment: Assignment, channel: GenerationChannel) -> WorkerMessage:
        """Calls the training function. Returns the message of its end, for the generation in which
        it ended."""
        function = self._train_function = self._train_function or load_train_function(
            self._spec.entrypoint
        )
        self._device = self._select_device()
        membership = self._enter(assignment, channel)
        collectives = FunctionCollectives(
            assignment.rank,
            lambda: self._channel.interrupt.is_set(),
            self._read_calls if assignment.survivors_stay else None,
        )
        session = self._session = JobSession(
            self._spec, membership, self._retained, self, collectives
        )
        context = Context(self._spec, self._device, session)
        try:
            with use_session(session), self._error_polling, calls_of(collectives):
                membership.join()
                result = self._json_result(call_function(function, context))
                session.check_loop()
                session.begin()
                session.finish()
        finally:
            self._end_call()
        return Finished(
            session.assignment.generation,
            session.assignment.rank,
            result,
            session.reporter.leftover_counters(),
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            memory=self._retained.in_process_state(),
        )

    def _new_channel(self, generation: int, rank: int) -> GenerationChannel:
        return GenerationChannel(self._post, generation, rank, self._give_up)

    def _give_up(self) -> NoReturn:
        self._error_polling.close()
        self._end_call()
        self._training_thread.give_up()

    def _end_call(self) -> None:
        """Called when the training function has ended, or is given up."""
        session, self._session = self._session, None
        if session is not None:
            self._notes = self._take_notes(session)
            session.close()
        for tee in self._tees:
            tee.finish_line()

    def _take_notes(self, session: JobSession) -> Notes | None:
        if session.loop.tell is None:
            return None
        try:
            step, content = session.loop.tell()
            return Notes(step, pickle.dumps(content))
        except Exception as error:  # noqa: BLE001  the training state has what was recorded before
            text = f"what the script has done after its last step is not known: {error!s:.999}"
            self._post_log("stderr", text)
            return None

    @property
    def _collective_timeout_s(self) -> float:
        """A fallback: normally hang detection by heartbeats aborts a collective before."""
        return 2 * self._spec.patience_s + 10

    def _on_left(self, drained: bool) -> InProcessStateInfo | None:
        if not drained:  # after a drain `_enter` aborts the group, once all ranks have left
            process_group.abort_default_group(self._device, self._channel.sockets)
        get_device(self._device).check_health(self._device_timeout_s)
        return self._retained.in_process_state()

    def _polled_errors(self, channel: GenerationChannel) -> AbstractContextManager[None]:
        def end_generation(error: str) -> None:
            if channel.fenced:
                return
            session = self._session
            if session is not None and session.outlives_generation:
                session.break_group(error)
                return
            channel.interrupt.fail(error)
            self._begin_abort(channel)

        return process_group.polled_group_errors(self._device, end_generation)

    def _post(self, message: WorkerMessage) -> None:
        if isinstance(message, Left):
            message = replace(message, notes=self._notes)
        self._record.note(message)  # first: a message that has left the outbox is in the record
        self._outbox.post(message)
        if isinstance(message, Crashed) and message.kind == "device":
            # The process cannot work any more, and holds the device's memory.
            ending = Timer(DEVICE_EXIT_S, os._exit, [DEVICE_EXIT_CODE])
            ending.daemon = True
            ending.start()

    def _json_result(self, result: Any) -> dict[str, Any] | None:
        """Returns the function's result as JSON; None, with a log line, if it cannot be encoded."""
        try:
            return None if result is None else encode_result(result)
        except Exception as error:  # noqa: BLE001  # the values' own code runs; training is done
            text = (
                f"the training function's result cannot be written to the summary: {error!s:.999}"
            )
            self._post_log("stderr", text)
            return None

    @property
    def log_number(self) -> int:
        return self._channel.rank
