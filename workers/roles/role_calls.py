"""The methods that the controller calls in the process of a role's worker. Free of torch."""

from __future__ import annotations

from typing import Protocol

from rayzero.workers.roles.view import RoleView
from rayzero.workers.stacks import Stacks


class RoleCalls(Protocol):
    """The methods of a role's worker, which `WorkerGroup.call` calls as it does those of
    `WorkerCalls` in a rank's process."""

    def begin(self, number: int, view: RoleView) -> None:
        """Calls the role's function, once. `Finished` or `Crashed` follows.

        Args:
            number: the worker's number in its role, from 0; a replacement has the lost worker's.
            view: as for `update`. The vault named in it watches for the end of the process.
        """

    def update(self, view: RoleView) -> None:
        """Replaces the view of the job, because the job has changed."""

    def end(self) -> None:
        """Announces the job's end: the context's waits and checks raise SystemExit from now on."""

    def inject(self, kind: str) -> None:
        """Sends this process the signal of a fault: see `signal_own_process`."""

    def dump_stack(self) -> Stacks:
        """Returns the stacks of the process's threads."""
