"""The job's checkpoints where they really are: on a disk, or in an object store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from rayzero.engine.checkpoint.catalogue import (
    CheckpointInfo,
    list_checkpoints,
    newest_complete,
    prune_checkpoints,
)
from rayzero.engine.checkpoint.format import step_folder_name
from rayzero.engine.checkpoint.manifest import make_manifest
from rayzero.engine.checkpoint.store import join_url
from rayzero.engine.checkpoint.writer import commit_checkpoint
from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.policies.recovery import CheckpointRef
from rayzero.workers.vault.records import RankFile


class FileCheckpointStore:
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
        self._settings = plan.spec.checkpoint
        self._warn = tell
        self._adopting = adopting
        self._check_lease = fence

    def folder(self, step: int) -> str:
        return join_url(self._plan.job_folder, step_folder_name(step))

    async def resolve_resume(self) -> CheckpointRef | None:
        if self._adopting:
            found = self._newest_usable(await self._list_checkpoints(self._plan.job_folder))
            if found is not None or self._settings.resume in ("auto", "never"):
                return found
        elif self._settings.resume == "auto":
            return self._newest_usable(await self._list_checkpoints(self._plan.job_folder))
        elif self._settings.resume == "never":
            self._refuse_existing(await self._list_checkpoints(self._plan.job_folder))
            return None
        return await self._resume_from(self._settings.resume)

    async def newest(self, excluding: frozenset[int]) -> CheckpointRef | None:
        found = await asyncio.to_thread(newest_complete, self._plan.job_folder, excluding)
        return None if found is None else CheckpointRef(found.step, found.folder)

    async def commit(self, step: int, generation: int, files: Sequence[RankFile]) -> None:
        await asyncio.to_thread(self._write_manifest, step, generation, files)

    def _write_manifest(self, step: int, generation: int, files: Sequence[RankFile]) -> None:
        name, stage = self._plan.spec.name, self._plan.stage
        manifest = make_manifest(name, step, generation, files, stage=stage)
        self._check_lease()
        commit_checkpoint(self.folder(step), manifest)

    async def prune(self) -> None:
        wanted = self._settings
        await asyncio.to_thread(
            prune_checkpoints, self._plan.job_folder, wanted.keep, wanted.keep_every
        )

    @staticmethod
    async def _list_checkpoints(path: str) -> list[CheckpointInfo]:
        return await asyncio.to_thread(list_checkpoints, path)

    def _newest_usable(self, found: Sequence[CheckpointInfo]) -> CheckpointRef | None:
        """The newest whole one; those beyond it are told, because their steps are lost."""
        for one in sorted(found, key=lambda one: one.step, reverse=True):
            if one.is_complete:
                return CheckpointRef(one.step, one.folder)
            if one.status != "unfinished":
                self._warn(f"the checkpoint {one.folder} is left out: {one.problem}")
        return None

    def _refuse_existing(self, found: Sequence[CheckpointInfo]) -> None:
        there = [one for one in found if one.status != "unfinished"]
        if there:
            raise ConfigError(
                f"{self._plan.job_folder} holds {len(there)} checkpoint{'s' * (len(there) != 1)}, the "
                f"newest of step {there[-1].step}, and checkpoint.resume is never",
                allowed="a folder without checkpoints",
                fix="another name or checkpoint.path, checkpoint.resume: auto, or remove them",
            )

    async def _resume_from(self, path: str) -> CheckpointRef:
        """A checkpoint by its folder, or the newest of a job's folder. What is no folder of ours
        may be a foreign checkpoint: which, and of which step, only a worker can say."""
        found = await self._list_checkpoints(path)
        stored = self._newest_usable(found)
        if stored is not None:
            return stored
        if found or not ("://" in path or Path(path).exists()):
            problem = found[-1].problem if found else "there is nothing"
            raise ConfigError(
                f"checkpoint.resume: {path!r} cannot be resumed from: {problem}",
                allowed="auto, never, or a checkpoint's folder: a path or a URL",
                fix="checkpoint.resume in the job file",
            )
        return CheckpointRef(0, path)
