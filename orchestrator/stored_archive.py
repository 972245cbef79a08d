"""The job's checkpoints where they really are: on a disk, or in an object store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from rayzero.engine.checkpoint.catalogue import Found, list_checkpoints, newest_whole
from rayzero.engine.checkpoint.format import step_folder
from rayzero.engine.checkpoint.manifest import make_manifest
from rayzero.engine.checkpoint.prune import prune
from rayzero.engine.checkpoint.store import join
from rayzero.engine.checkpoint.writer import commit
from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.policies.recovery import Stored
from rayzero.workers.messages import RankFile


class StoredArchive:
    """An Archive. The store is only ever asked in other threads.

    Args:
        tell: shows a warning.
        adopting: the checkpoints of the job's folder are those of the run that is gone on with, so
            they come before all that `checkpoint.resume` may say.
        fence: raises when the folder is somebody else's by now; asked before each commit.
    """

    def __init__(
        self,
        plan: JobPlan,
        tell: Callable[[str], None],
        *,
        adopting: bool = False,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan = plan
        self._wanted = plan.spec.checkpoint
        self._tell = tell
        self._adopting = adopting
        self._fence = fence

    def folder(self, step: int) -> str:
        return join(self._plan.archive, step_folder(step))

    async def begin(self) -> Stored | None:
        if self._adopting:
            found = self._usable(await self._list(self._plan.archive))
            if found is not None or self._wanted.resume in ("auto", "never"):
                return found
        elif self._wanted.resume == "auto":
            return self._usable(await self._list(self._plan.archive))
        elif self._wanted.resume == "never":
            self._refuse(await self._list(self._plan.archive))
            return None
        return await self._named(self._wanted.resume)

    async def newest(self, excluding: frozenset[int]) -> Stored | None:
        found = await asyncio.to_thread(newest_whole, self._plan.archive, excluding)
        return None if found is None else Stored(found.step, found.folder)

    async def commit(self, step: int, generation: int, files: Sequence[RankFile]) -> None:
        await asyncio.to_thread(self._commit, step, generation, files)

    def _commit(self, step: int, generation: int, files: Sequence[RankFile]) -> None:
        name, stage = self._plan.spec.name, self._plan.stage
        manifest = make_manifest(name, step, generation, files, stage=stage)
        self._fence()
        commit(self.folder(step), manifest)

    async def prune(self) -> None:
        wanted = self._wanted
        await asyncio.to_thread(prune, self._plan.archive, wanted.keep, wanted.keep_every)

    @staticmethod
    async def _list(path: str) -> list[Found]:
        return await asyncio.to_thread(list_checkpoints, path)

    def _usable(self, found: Sequence[Found]) -> Stored | None:
        """The newest whole one; those beyond it are told, because their steps are lost."""
        for one in sorted(found, key=lambda one: one.step, reverse=True):
            if one.is_whole:
                return Stored(one.step, one.folder)
            if one.condition != "unfinished":
                self._tell(f"the checkpoint {one.folder} is left out: {one.problem}")
        return None

    def _refuse(self, found: Sequence[Found]) -> None:
        there = [one for one in found if one.condition != "unfinished"]
        if there:
            raise ConfigError(
                f"{self._plan.archive} holds {len(there)} checkpoint{'s' * (len(there) != 1)}, the "
                f"newest of step {there[-1].step}, and checkpoint.resume is never",
                allowed="a folder without checkpoints",
                fix="another name or checkpoint.path, checkpoint.resume: auto, or remove them",
            )

    async def _named(self, path: str) -> Stored:
        """A checkpoint by its folder, or the newest of a job's folder. What is no folder of ours
        may be a foreign checkpoint: which, and of which step, only a worker can say."""
        found = await self._list(path)
        stored = self._usable(found)
        if stored is not None:
            return stored
        if found or not ("://" in path or Path(path).exists()):
            problem = found[-1].problem if found else "there is nothing"
            raise ConfigError(
                f"checkpoint.resume: {path!r} cannot be resumed from: {problem}",
                allowed="auto, never, or a checkpoint's folder: a path or a URL",
                fix="checkpoint.resume in the job file",
            )
        return Stored(0, path)
