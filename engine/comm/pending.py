"""Something to do when a collective has arrived."""

from __future__ import annotations

from collections.abc import Callable

from rayzero.engine.comm.collectives import Pending


class Then:
    """A pending collective, and what is done once when it has been waited for."""

    def __init__(self, pending: Pending, finish: Callable[[], None]) -> None:
        self._pending = pending
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        self._pending.wait()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def release(self) -> None:
        self.wait()
        self._pending.release()
