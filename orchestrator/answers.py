"""One command that went to many workers, and who has answered it."""

from __future__ import annotations

from collections.abc import Iterable

from rayzero.orchestrator.bell import Bell


class Answers:
    """Filled by the group that sent the command, in its event loop.

    Whoever is lost on the way is no longer waited for: `WorkerGroup.hear` tells of it.
    """

    def __init__(self, workers: Iterable[int] = ()) -> None:
        self.missing = set(workers)
        """Who has not answered yet."""
        self._error: Exception | None = None
        self._bell = Bell()

    def came(self, workers: Iterable[int]) -> None:
        """These have answered, or are lost."""
        self.missing.difference_update(workers)
        self._bell.ring()

    def failed(self, error: Exception) -> None:
        """One of them could not do it; the first such error is raised by those who wait."""
        self._error = self._error or error
        self._bell.ring()

    async def any_of(self, workers: frozenset[int]) -> None:
        """Returns once somebody of these is missing no longer."""
        await self._bell.until(lambda: self._error is not None or not workers <= self.missing)
        self._check()

    async def all(self) -> None:
        """Returns once nobody is missing.

        Raises:
            RayzeroError: one of them could not do it.
        """
        await self._bell.until(lambda: self._error is not None or not self.missing)
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
