"""The job's checkpoints on a disk or in an object store.

Rule of ordering: `manifest-last` (docs/engine.md).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rayzero.engine.checkpoint.catalogue import (
    CheckpointInfo,
    list_checkpoints,
    newest_complete,
    prune_checkpoints,
)
from rayzero.engine.checkpoint.format import step_folder_name
from rayzero.engine.checkpoint.manifest import RankFile, make_manifest
from rayzero.engine.checkpoint.store import is_remote, join_url, local_path
from rayzero.engine.checkpoint.verify import mark_damaged
from rayzero.engine.checkpoint.writer import commit_checkpoint
from rayzero.engine.errors import ConfigError, EngineError
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.policies.recovery import CheckpointRef
from rayzero.orchestrator.top.format import count_of


class CheckpointStore:
    """One job's folder of checkpoints. All I/O runs in other threads, and may raise StoreError.

    Args:
        warn: emits a warning; thread-safe.
        adopting: whether this run continues a run that lost its controller. The checkpoints in the
            job's folder then belong to this run, and take precedence over `checkpoint.resume`.
        check_lease: called before each change; raises if another process owns the folder.
    """

    def __init__(
        self,
        plan: JobPlan,
        warn: Callable[[str], None],
        *,
        adopting: bool = False,
        check_lease: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan = plan
        self._settings = plan.spec.checkpoint
        self._warn = warn
        self._adopting = adopting
        self._check_lease = check_lease

    def folder(self, step: int) -> str:
        """Returns the path or URL of a step's checkpoint."""
        return join_url(self._plan.job_folder, step_folder_name(step))

    async def check_folder(self) -> None:
        """Raises if another process owns the job's folder. Creates the folder again if it was
        removed. Called before files are written."""
        await asyncio.to_thread(self._check_lease)

    async def resolve_resume(self) -> CheckpointRef | None:
        """Returns the checkpoint that `checkpoint.resume` selects for this run.

        Raises:
            ConfigError: there is no such checkpoint; or `resume` is `never` and the folder has
                checkpoints; or checkpoints exist, none of them is usable, and `resume` is not
                `scratch`.
        """
        return await asyncio.to_thread(self._find_resume_point)

    async def newest(self, excluding: frozenset[int]) -> CheckpointRef | None:
        """Returns the newest complete checkpoint that is not of an excluded step."""
        newest = await asyncio.to_thread(newest_complete, self._plan.job_folder, excluding)
        return None if newest is None else CheckpointRef(newest.step, newest.folder)

    async def mark_damaged(self, checkpoint: CheckpointRef, problem: str) -> None:
        """Checks the files of a checkpoint that a load could not read, and marks the checkpoint if
        a file is damaged. Does nothing for a checkpoint of another job."""
        if checkpoint.folder != self.folder(checkpoint.step):
            return
        cancelled = threading.Event()

        def stop_reading(_: int) -> None:
            if cancelled.is_set():
                raise EngineError("the job ends")

        try:
            await asyncio.to_thread(
                mark_damaged, checkpoint.folder, problem, self._check_lease, stop_reading
            )
        finally:
            cancelled.set()

    async def commit(self, step: int, generation: int, files: Sequence[RankFile]) -> None:
        """Writes the manifest, which makes the checkpoint exist. The files of its ranks are durable
        before."""
        await asyncio.to_thread(self._write_manifest, step, generation, files)

    async def prune(self) -> tuple[int, ...]:
        """Removes checkpoints by `checkpoint.keep` and `keep_every`. Returns the removed steps."""
        keep, keep_every = self._settings.keep, self._settings.keep_every
        await asyncio.to_thread(self._check_lease)
        folder = self._plan.job_folder
        return (await asyncio.to_thread(prune_checkpoints, folder, keep, keep_every)).removed

    def _write_manifest(self, step: int, generation: int, files: Sequence[RankFile]) -> None:
        name, stage = self._plan.spec.name, self._plan.stage
        manifest = make_manifest(name, step, generation, files, stage=stage)
        self._check_lease()
        # Checked again before a manifest is replaced: a process that took over may have written it.
        commit_checkpoint(self.folder(step), manifest, self._check_lease)

    def _find_resume_point(self) -> CheckpointRef | None:
        resume, own_folder = self._settings.resume, self._plan.job_folder
        if self._adopting or resume == "auto":
            checkpoints = list_checkpoints(own_folder)
            newest = self._newest_usable(checkpoints)
            if newest is None and resume != "scratch":
                self._refuse_unusable(checkpoints)
            if newest is not None or resume in ("auto", "never", "scratch"):
                return newest
        elif resume in ("never", "scratch"):
            self._refuse_existing(list_checkpoints(own_folder))
            return None
        return self._resume_from(resume)

    def _refuse_unusable(self, checkpoints: Sequence[CheckpointInfo]) -> None:
        """Raises ConfigError if there are finished checkpoints. None of them is usable, and only
        the user may decide to start from scratch."""
        unusable = [info for info in checkpoints if info.status != "unfinished"]
        if not unusable:
            return
        info = unusable[-1]
        instead = "upgrade rayzero" if info.status == "newer" else "copy its files back"
        raise ConfigError(
            f"no checkpoint in {self._plan.job_folder} can be used; the newest is that of step "
            f"{info.step}: {info.problem}",
            allowed="a complete checkpoint, or to start from scratch with --restart",
            fix=f"see `rayzero ckpt ls {self._plan.job_folder}`; {instead}, or pass --restart "
            "(checkpoint.resume: scratch)",
        )

    def _newest_usable(self, checkpoints: Sequence[CheckpointInfo]) -> CheckpointRef | None:
        """Returns the newest complete checkpoint. Warns about newer unusable ones, because their
        steps are lost."""
        for info in sorted(checkpoints, key=lambda info: info.step, reverse=True):
            if info.is_complete:
                return CheckpointRef(info.step, info.folder)
            if info.status != "unfinished":
                self._warn(f"the checkpoint {info.folder} is skipped: {info.problem}")
        return None

    def _refuse_existing(self, checkpoints: Sequence[CheckpointInfo]) -> None:
        """Raises ConfigError if the folder has checkpoints of another run, because a new run's
        checkpoints would not be the newest. Unfinished checkpoints are allowed, and with `resume:
        scratch` damaged ones."""
        resume = self._settings.resume
        harmless = ("unfinished", "damaged") if resume == "scratch" else ("unfinished",)
        existing = [info for info in checkpoints if info.status not in harmless]
        if existing:
            usable = " that can be used" if resume == "scratch" else ""
            remote = "; an object store cannot set them aside" if resume == "scratch" else ""
            raise ConfigError(
                f"{self._plan.job_folder} holds {count_of(len(existing), 'checkpoint')}{usable}, "
                f"the newest of step {existing[-1].step}, and checkpoint.resume is {resume}",
                allowed=f"a folder without checkpoints{usable}",
                fix="choose another name or checkpoint.path, set checkpoint.resume: auto, or "
                f"remove them{remote}",
            )

    def _resume_from(self, path: str) -> CheckpointRef:
        """Returns the checkpoint at `path`, or the newest one if `path` is a job's folder. Any
        other folder may be a foreign checkpoint, whose format and step only a worker can
        determine."""
        checkpoints = list_checkpoints(path)
        newest = self._newest_usable(checkpoints)
        if newest is not None:
            own = self.folder(newest.step)
            return replace(newest, folder=own) if _is_same_folder(newest.folder, own) else newest
        check_resume_exists(path)
        if checkpoints:
            raise _resume_error(path, checkpoints[-1].problem)
        return CheckpointRef(0, path)


def _is_same_folder(first: str, second: str) -> bool:
    """Returns whether two paths or URLs name the same folder."""
    if is_remote(first) or is_remote(second):
        return first == second
    return os.path.realpath(local_path(first)) == os.path.realpath(local_path(second))


def check_resume_exists(resume: str) -> None:
    """Raises ConfigError if `checkpoint.resume` is a path that does not exist."""
    is_path = resume not in ("auto", "never", "scratch") and not is_remote(resume)
    if is_path and not Path(local_path(resume)).exists():
        raise _resume_error(resume, "there is no such folder")


def _resume_error(path: str, problem: str) -> ConfigError:
    return ConfigError(
        f"checkpoint.resume: {path!r} cannot be resumed from: {problem}",
        allowed="auto, never, or a checkpoint's folder: a path or a URL",
        fix="checkpoint.resume in the job file",
    )
