"""Everything a worker's process does, without Ray: the actor only forwards calls to it."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.session import entered
from rayzero.workers import process_group
from rayzero.workers.context import Context
from rayzero.workers.entrypoint import TrainFunction, training_function
from rayzero.workers.faults import parse
from rayzero.workers.injector import FaultRecord, Injector, Schedule
from rayzero.workers.job_session import JobSession
from rayzero.workers.keeper import Keeper
from rayzero.workers.logs import teed
from rayzero.workers.messages import (
    Assign,
    Finished,
    Joined,
    LogLine,
    Memory,
    Message,
    Setup,
    SlotInfo,
)
from rayzero.workers.outbox import Outbox
from rayzero.workers.runner import Runner
from rayzero.workers.warmth import warm_up
from rayzero.workers.wire import Wire

FENCE_TRIES, FENCE_TRY_S = 20, 0.1


class WorkerHost:
    """One worker process. Its methods are called by the command threads; none of them waits for
    the training thread, so the worker always answers.

    Lifetimes: the tees, the outbox and the store live as long as the process; a context and its
    wire live for one generation.
    """

    def __init__(self, setup: Setup, index: int) -> None:
        self._setup = setup
        self._rank = index  # until the first generation says better
        self._outbox = Outbox()
        self._keeper = Keeper(index)
        self._schedule = Schedule((), FaultRecord(setup.output_dir), self._outbox.post)
        self._runner = Runner(on_unwound=self._unwound)
        self._wire = Wire(self._outbox.post)
        self._function: TrainFunction | None = None
        self._store: TCPStore | None = None
        self._open = ExitStack()
        self._tees = self._open.enter_context(teed(self._log))
        torch.set_num_threads(max(1, int(setup.cpus)))
        self._enter_working_dir()

    def open_store(self) -> int:
        """The port of a store that this process serves from now on."""
        self._store = process_group.open_store(self._collective_timeout_s)
        return int(self._store.port)

    def prepare(self) -> None:
        """Gets slow firsts over with, so that no peer waits for them in a generation. Whatever
        is wrong with the user's module is told when the first generation needs it."""
        with suppress(ConfigError):
            self._function = training_function(self._setup.entrypoint)
        warm_up()

    def assign(self, assign: Assign) -> None:
        """Begins a generation: joins its group, then calls the user's function."""
        self._rank = assign.rank
        self._wire = Wire(self._outbox.post, assign.generation)
        wire = self._wire
        self._runner.start(assign, lambda: self._generation(assign, wire), wire)

    def poll(self, timeout_s: float) -> list[Message]:
        """What happened since the last poll, and last of all a heartbeat."""
        return [*self._outbox.take(timeout_s), self._wire.progress.heartbeat(self._rank)]

    def stop(self, generation: int) -> None:
        """Unwinds the user's function at its next report, phase or step; `Stopped` follows.

        Like `drain` and `fence` it is meant for one generation: late, it does nothing.
        """
        if self._wire.generation == generation:
            self._wire.interrupt.request()

    def drain(self, generation: int) -> None:
        """Unwinds the user's function at the end of a step that all ranks agree on, mirrored."""
        if self._wire.generation == generation:
            self._wire.drain.request()

    def fence(self, generation: int) -> None:
        """As `stop`, and breaks off the wait for peers that the function may be in.

        More than once, because it may be about to begin one, in joining.
        """
        wire = self._wire
        if wire.generation != generation:
            return
        wire.interrupt.request()
        for _ in range(FENCE_TRIES):
            if self._wire is not wire:
                return  # the next generation has begun: its group is not ours to break off
            process_group.break_off(wire.connections)
            if self._runner.join(FENCE_TRY_S):
                return

    def inject(self, faults: Sequence[str]) -> None:
        """Further faults from now on: all that were injected since the job began."""
        self._schedule.want(parse(text) for text in (*self._setup.faults, *faults))

    def salvage(self, vault: str) -> SlotInfo:
        """Copies the state in this process's memory into the vault at that address, once the
        function is unwound.

        Raises:
            EngineError: the function is not unwound, or there is no state.
        """
        if not self._runner.join(timeout_s=1):
            raise EngineError("the training function is still under way: its state is not at rest")
        return self._keeper.salvage(vault)

    def dump_stack(self) -> str:
        """The Python stack of every thread of this process."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in sys._current_frames().items()
        )

    def close(self) -> None:
        """Puts sys.stdout and sys.stderr back; for tests, since an actor's process just ends."""
        self._runner.stop()
        self._runner.join(timeout_s=5)
        self._keeper.close()
        self._open.close()

    def _generation(self, assign: Assign, wire: Wire) -> Message:
        function = self._function = self._function or training_function(self._setup.entrypoint)
        device = self._device()
        self.inject(assign.faults)
        injector = Injector(self._schedule, assign.rank)
        step = 1 + (assign.restore.step if assign.restore else 0)
        wire.progress.entered("join")
        injector.at("join", step)
        self._keeper.begin(assign)  # first: the vault is to notice a death in joining, too
        wire.interrupt.check()
        process_group.abort(wire.connections)  # a function that returned or drained left its own
        process_group.join(assign, device, self._collective_timeout_s, wire.connections)
        wire.post(Joined(assign.generation, assign.rank))
        session = JobSession(self._setup, assign, wire, self._keeper, injector)
        context = Context(self._setup, assign, device, session)
        wire.progress.working_on(step)
        try:
            with entered(session):
                result = self._plain(function(context))
        finally:
            session.close()
            for tee in self._tees:
                tee.finish_line()
        return Finished(
            assign.generation,
            assign.rank,
            result,
            session.reports.unreported(),
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    @property
    def _collective_timeout_s(self) -> float:
        """The last resort: a hang is noticed by heartbeats, and its collective broken off, before
        that."""
        return 2 * self._setup.hang_timeout_s + 10

    def _unwound(self, drained: bool) -> Memory | None:
        if not drained:  # else the next generation does it, which begins when all have left
            process_group.abort(self._wire.connections)
        return self._keeper.memory()

    def _device(self) -> torch.device:
        if self._setup.gpus <= 0:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise ConfigError(
                f"the job asks for {self._setup.gpus:g} GPU a worker, but torch {torch.__version__}"
                " finds no CUDA device on the worker's node",
                fix="workers.gpus in the job file, or a torch with CUDA on the nodes",
            )
        return torch.device("cuda", 0)  # Ray shows a worker its own device only

    def _plain(self, result: Any) -> dict[str, Any] | None:
        """The function's result as JSON can hold it; what cannot be held is told and left out."""
        if result is None:
            return None
        kept: Any = None
        if isinstance(result, Mapping):
            try:
                kept = json.loads(json.dumps(dict(result), default=_scalar))
            except (TypeError, ValueError) as error:
                self._log("stderr", f"what the function returned cannot become JSON: {error}")
        else:
            kind = type(result).__name__
            self._log("stderr", f"the function returned {kind}: only a dict goes into the summary")
        return kept if isinstance(kept, dict) else None

    def _enter_working_dir(self) -> None:
        folder = self._setup.working_dir
        try:
            os.chdir(folder)
        except OSError as error:
            self._log(
                "stderr",
                f"the submitter's folder {folder} is not on this node ({error.strerror}): "
                f"relative paths start at {os.getcwd()}",
            )
        first, *others = self._setup.import_paths or (os.getcwd(),)
        sys.path.insert(0, first)
        sys.path.extend(path for path in others if path not in sys.path)

    def _log(self, stream: str, text: str) -> None:
        self._outbox.post(LogLine(self._rank, stream, text))


def _scalar(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a number, a text, a list or a dict")
