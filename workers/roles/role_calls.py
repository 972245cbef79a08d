"""The calls that the controller makes in the process of a role's worker. Free of torch."""

from __future__ import annotations

from typing import Protocol

from rayzero.workers.roles.view import RoleView
from rayzero.workers.stacks import Stacks


class RoleCalls(Protocol):
    """Called by `WorkerGroup.call`, as `WorkerCalls` in a rank's process."""

    def begin(self, number: int, view: RoleView) -> None:
        """Calls the role's function, once. `Finished` or `Crashed` follows.

        Args:
            number: of the worker in its role, from 0; a replacement has that of the lost one.
            view: as of `update`. The vault in it sees the process end.
        """

    def update(self, view: RoleView) -> None:
        """The job has changed: what waits for that looks again."""

    def end(self) -> None:
        """The job ends: the context's waits and checks raise SystemExit from now on."""

    def inject(self, kind: str) -> None:
        """Sends its process the signal of a fault: see `signal_own_process`."""

    def dump_stack(self) -> Stacks:
        """Returns what the threads of the process do."""
