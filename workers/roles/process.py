"""The process of a role's worker, without Ray."""

from __future__ import annotations

import logging
import resource
from contextlib import suppress
from threading import Event, Thread

from rayzero.engine.errors import ConfigError, EngineError
from rayzero.workers.chaos.inject import signal_own_process
from rayzero.workers.crash import describe_crash
from rayzero.workers.entrypoint import TrainFunction, call_function, load_train_function
from rayzero.workers.messages import Crashed, Finished, RoleWorkerSpec, WorkerInfo, WorkerMessage
from rayzero.workers.process_group import warm_up_torch
from rayzero.workers.roles.context import RoleContext
from rayzero.workers.roles.reporter import RoleReporter
from rayzero.workers.roles.role_calls import RoleCalls
from rayzero.workers.roles.view import RoleView
from rayzero.workers.stacks import TRAINING_THREAD, Stacks, read_stacks
from rayzero.workers.training_thread import ProgressRecord
from rayzero.workers.user_process import UserProcess
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.records import VaultGoneError
from rayzero.workers.worker_status import WorkerStatus

log = logging.getLogger("rayzero.workers")


class RoleProcess(UserProcess, RoleCalls):
    """One worker of a role. The command threads call its methods. The role's function runs once, in
    a daemon thread."""

    def __init__(self, spec: RoleWorkerSpec, index: int) -> None:
        super().__init__(spec)
        self._role_spec = spec
        self.log_role = spec.role
        self.node_address = "127.0.0.1"  # replaced by the node's address, as for ranks
        self.index = index
        self._number = index
        self.progress = ProgressRecord(index)
        self.ending = Event()
        self.view = RoleView()
        self.vault: VaultClient | None = None
        self.reporter = RoleReporter()
        self._function: TrainFunction | None = None
        self._thread: Thread | None = None
        self._end: tuple[Finished | Crashed, ...] = ()
        self.begin_output()

    @property
    def log_number(self) -> int:
        return self._number

    def status(self, info: WorkerInfo, group: str) -> WorkerStatus:
        number = None if self._thread is None else self._number
        return WorkerStatus(info, group, messages=self._end, role=self.log_role, number=number)

    def warm_up(self) -> None:
        """Imports the function and torch in advance. Errors are reported when it is called."""
        with suppress(ConfigError):
            self._function = load_train_function(self._spec.entrypoint)
        with suppress(ConfigError):
            warm_up_torch(self._select_device())

    def begin(self, number: int, view: RoleView) -> None:
        """See `RoleCalls`.

        Raises:
            EngineError: the function has been called in this process.
        """
        if self._thread is not None:
            raise EngineError(f"the function of {self.log_role} {number} has been called")
        self._number = number
        self.progress = ProgressRecord(number)
        self.update(view)  # first: the vault must see the process end from the first line on
        self._thread = Thread(target=self._run, name=TRAINING_THREAD, daemon=True)
        self._thread.start()

    def update(self, view: RoleView) -> None:
        """See `RoleCalls`. The controller waits for the reply before it calls again."""
        if view.vault and (self.vault is None or self.vault.address != view.vault):
            earlier = self.vault
            try:
                self.vault = VaultClient(view.vault, self.index)
            except VaultGoneError as error:  # the controller sees that, and opens another vault
                log.warning("%s", error.seen)
            if earlier is not None and self.vault is not earlier:
                earlier.close()
        self.view = view

    def poll(self, timeout_s: float) -> list[WorkerMessage]:
        """Returns the messages since the last poll, and then a heartbeat. Waits up to `timeout_s`
        for the first message."""
        messages = self._outbox.poll(timeout_s)
        reports = self.reporter.take(self.log_role, self._number)
        return [*reports, *messages, self.progress.heartbeat()]

    def end(self) -> None:
        self.ending.set()

    def inject(self, kind: str) -> None:
        signal_own_process(kind)

    def dump_stack(self) -> Stacks:
        return read_stacks()

    def _run(self) -> None:
        message: Finished | Crashed
        try:
            function = self._function or load_train_function(self._spec.entrypoint)
            device = self._select_device()
            self.progress.enter_phase("run")
            call_function(function, RoleContext(self._role_spec, self._number, device, self))
            message = self._finished()
        except BaseException as error:  # noqa: BLE001  # the thread's last frame: report everything
            if self.ending.is_set() and isinstance(error, SystemExit):
                message = self._finished()
            else:
                message = describe_crash(error, 0, self._number, self.progress.step)
        for tee in self._tees:
            tee.finish_line()
        self._end = (message,)  # first: a controller may be lost right after it got the message
        self._outbox.post(message)

    def _finished(self) -> Finished:
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Finished(0, self._number, None, {}, peak_bytes)
