"""The job's checkpoints as the controller needs them: which there are, commit one, prune."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rayzero.orchestrator.policies.recovery import Stored
from rayzero.workers.messages import RankFile


class Archive(Protocol):
    """One job's folder of checkpoints. Everything that waits for a store is awaited, and none of
    it blocks the event loop. All of it may raise StoreError: full, gone, forbidden, slow."""

    def folder(self, step: int) -> str:
        """Where the checkpoint of that step lies, or is to lie."""

    async def begin(self) -> Stored | None:
        """What this run of the job begins from, by `checkpoint.resume`.

        Raises:
            ConfigError: there is no such checkpoint, or there are some and none is wanted.
        """

    async def newest(self, excluding: frozenset[int]) -> Stored | None:
        """The newest whole checkpoint but for these steps."""

    async def commit(self, step: int, generation: int, files: Sequence[RankFile]) -> None:
        """Makes a checkpoint exist: its files are durable, its manifest is now."""

    async def prune(self) -> None:
        """Removes what `checkpoint.keep` and `keep_every` do not keep."""
