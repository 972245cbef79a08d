"""WorkerProcess: commands, generations.

Everything a worker's process does, without Ray: the actor only forwards calls to it.

Slow firsts of torch, done before a worker is counted as ready.
"""

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
from rayzero.engine.session import use_session
from rayzero.workers import process_group
from rayzero.workers.chaos.inject import FaultRecord, FaultSchedule, WorkerFaultInjector
from rayzero.workers.chaos.spec import parse_fault
from rayzero.workers.entrypoint import TrainFunction, load_train_function
from rayzero.workers.messages import (
    Assignment,
    Finished,
    InProcessStateInfo,
    Joined,
    LogLine,
    WorkerMessage,
    WorkerSpec,
)
from rayzero.workers.output import Outbox, tee_output
from rayzero.workers.retained_state import RetainedState
from rayzero.workers.session import Context, JobSession
from rayzero.workers.training_thread import GenerationChannel, TrainingThread
from rayzero.workers.vault.records import SlotInfo


def warm_up_torch() -> None:
    """One step of a tiny model: torch's first optimizer loads some 100 MB of modules, the first
    backward starts autograd's threads. A worker that joins a running job must not make its peers
    wait for that.
    """
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.square().sum().backward()
    optimizer.step()


FENCE_ATTEMPTS, FENCE_ATTEMPT_S = 20, 0.1


class WorkerProcess:
    """One worker process. Its methods are called by the command threads; none of them waits for
    the training thread, so the worker always answers.

    Lifetimes: the tees, the outbox and the store live as long as the process; a context and its
    wire live for one generation.
    """

    def __init__(self, setup: WorkerSpec, index: int) -> None:
        self._spec = setup
        self._rank = index  # until the first generation says better
        self._outbox = Outbox()
        self._retained = RetainedState(index)
        self._fault_schedule = FaultSchedule((), FaultRecord(setup.output_dir), self._outbox.post)
        self._training_thread = TrainingThread(on_unwound=self._on_unwound)
        self._channel = GenerationChannel(self._outbox.post)
        self._train_function: TrainFunction | None = None
        self._store: TCPStore | None = None
        self._exit_stack = ExitStack()
        self._tees = self._exit_stack.enter_context(tee_output(self._post_log))
        torch.set_num_threads(max(1, int(setup.cpus)))
        self._enter_working_dir()

    def open_store(self) -> int:
        """The port of a store that this process serves from now on."""
        self._store = process_group.open_store(self._collective_timeout_s)
        return int(self._store.port)

    def warm_up(self) -> None:
        """Gets slow firsts over with, so that no peer waits for them in a generation. Whatever
        is wrong with the user's module is told when the first generation needs it."""
        with suppress(ConfigError):
            self._train_function = load_train_function(self._spec.entrypoint)
        warm_up_torch()

    def assign(self, assign: Assignment) -> None:
        """Begins a generation: joins its group, then calls the user's function."""
        self._rank = assign.rank
        self._channel = GenerationChannel(self._outbox.post, assign.generation)
        wire = self._channel
        self._training_thread.start(assign, lambda: self._run_generation(assign, wire), wire)

    def poll(self, timeout_s: float) -> list[WorkerMessage]:
        """What happened since the last poll, and last of all a heartbeat."""
        return [*self._outbox.poll(timeout_s), self._channel.progress.heartbeat(self._rank)]

    def stop(self, generation: int) -> None:
        """Unwinds the user's function at its next report, phase or step; `Stopped` follows.

        Like `drain` and `fence` it is meant for one generation: late, it does nothing.
        """
        if self._channel.generation == generation:
            self._channel.interrupt.request()

    def drain(self, generation: int) -> None:
        """Unwinds the user's function at the end of a step that all ranks agree on, mirrored."""
        if self._channel.generation == generation:
            self._channel.drain.request()

    def fence(self, generation: int) -> None:
        """As `stop`, and breaks off the wait for peers that the function may be in.

        More than once, because it may be about to begin one, in joining.
        """
        wire = self._channel
        if wire.generation != generation:
            return
        wire.interrupt.request()
        for _ in range(FENCE_ATTEMPTS):
            if self._channel is not wire:
                return  # the next generation has begun: its group is not ours to break off
            process_group.interrupt_collectives(wire.sockets)
            if self._training_thread.join(FENCE_ATTEMPT_S):
                return

    def inject(self, faults: Sequence[str]) -> None:
        """Further faults from now on: all that were injected since the job began."""
        self._fault_schedule.set_faults(parse_fault(text) for text in (*self._spec.faults, *faults))

    def salvage(self, vault: str) -> SlotInfo:
        """Copies the state in this process's memory into the vault at that address, once the
        function is unwound.

        Raises:
            EngineError: the function is not unwound, or there is no state.
        """
        if not self._training_thread.join(timeout_s=1):
            raise EngineError("the training function is still under way: its state is not at rest")
        return self._retained.salvage(vault)

    def dump_stack(self) -> str:
        """The Python stack of every thread of this process."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in sys._current_frames().items()
        )

    def close(self) -> None:
        """Puts sys.stdout and sys.stderr back; for tests, since an actor's process just ends."""
        self._training_thread.stop()
        self._training_thread.join(timeout_s=5)
        self._retained.close()
        self._exit_stack.close()

    def _run_generation(self, assign: Assignment, wire: GenerationChannel) -> WorkerMessage:
        function = self._train_function = self._train_function or load_train_function(
            self._spec.entrypoint
        )
        device = self._select_device()
        self.inject(assign.faults)
        injector = WorkerFaultInjector(self._fault_schedule, assign.rank)
        step = 1 + (assign.restore.step if assign.restore else 0)
        wire.progress.enter_phase("join")
        injector.on_phase("join", step)
        self._retained.begin_generation(
            assign
        )  # first: the vault is to notice a death in joining, too
        wire.interrupt.check()
        process_group.abort_default_group(
            wire.sockets
        )  # a function that returned or drained left its own
        process_group.join_process_group(assign, device, self._collective_timeout_s, wire.sockets)
        wire.post(Joined(assign.generation, assign.rank))
        session = JobSession(self._spec, assign, wire, self._retained, injector)
        context = Context(self._spec, assign, device, session)
        wire.progress.begin_step(step)
        try:
            with use_session(session):
                result = self._json_result(function(context))
        finally:
            session.close()
            for tee in self._tees:
                tee.finish_line()
        return Finished(
            assign.generation,
            assign.rank,
            result,
            session.reporter.leftover_counters(),
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    @property
    def _collective_timeout_s(self) -> float:
        """The last resort: a hang is noticed by heartbeats, and its collective broken off, before
        that."""
        return 2 * self._spec.hang_timeout_s + 10

    def _on_unwound(self, drained: bool) -> InProcessStateInfo | None:
        if not drained:  # else the next generation does it, which begins when all have left
            process_group.abort_default_group(self._channel.sockets)
        return self._retained.in_process_state()

    def _select_device(self) -> torch.device:
        if self._spec.gpus <= 0:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise ConfigError(
                f"the job asks for {self._spec.gpus:g} GPU a worker, but torch {torch.__version__}"
                " finds no CUDA device on the worker's node",
                fix="workers.gpus in the job file, or a torch with CUDA on the nodes",
            )
        return torch.device("cuda", 0)  # Ray shows a worker its own device only

    def _json_result(self, result: Any) -> dict[str, Any] | None:
        """The function's result as JSON can hold it; what cannot be held is told and left out."""
        if result is None:
            return None
        kept: Any = None
        if isinstance(result, Mapping):
            try:
                kept = json.loads(json.dumps(dict(result), default=_to_json_scalar))
            except (TypeError, ValueError) as error:
                self._post_log("stderr", f"what the function returned cannot become JSON: {error}")
        else:
            kind = type(result).__name__
            self._post_log(
                "stderr", f"the function returned {kind}: only a dict goes into the summary"
            )
        return kept if isinstance(kept, dict) else None

    def _enter_working_dir(self) -> None:
        folder = self._spec.working_dir
        try:
            os.chdir(folder)
        except OSError as error:
            self._post_log(
                "stderr",
                f"the submitter's folder {folder} is not on this node ({error.strerror}): "
                f"relative paths start at {os.getcwd()}",
            )
        first, *others = self._spec.import_paths or (os.getcwd(),)
        sys.path.insert(0, first)
        sys.path.extend(path for path in others if path not in sys.path)

    def _post_log(self, stream: str, text: str) -> None:
        self._outbox.post(LogLine(self._rank, stream, text))


def _to_json_scalar(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a number, a text, a list or a dict")
