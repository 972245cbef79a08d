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


class CheckpointStore:
    """One job's folder of checkpoints. All I/O runs in other threads, and may raise StoreError.

    Args:
        warn: emits a warning; thread-safe.
        adopting: whether the run continues one that lost its controller: checkpoints in the job's
            folder belong to it, and take precedence over `checkpoint.resume`.
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
        """The path or URL of that step's checkpoint."""
        return join_url(self._plan.job_folder, step_folder_name(step))

    async def check_folder(self) -> None:
        """Before files are written: raises if another process owns the job's folder. Makes it
        again if it was removed."""
        await asyncio.to_thread(self._check_lease)

    async def resolve_resume(self) -> CheckpointRef | None:
        """The checkpoint that this run starts from, by `checkpoint.resume`.

        Raises:
            ConfigError: there is no such checkpoint; or there are some and resume is `never`; or
                none of those that exist can be used, and resume is not `scratch`.
        """
        return await asyncio.to_thread(self._find_resume_point)

    async def newest(self, excluding: frozenset[int]) -> CheckpointRef | None:
        """The newest complete checkpoint, without those of the excluded steps."""
        newest = await asyncio.to_thread(newest_complete, self._plan.job_folder, excluding)
        return None if newest is None else CheckpointRef(newest.step, newest.folder)

    async def mark_damaged(self, checkpoint: CheckpointRef, problem: str) -> None:
        """Marks a checkpoint in which a load found a problem, if a file of it is damaged and it is
        this job's own."""
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
        """Writes the manifest, which makes the checkpoint exist. Its files are durable already."""
        await asyncio.to_thread(self._write_manifest, step, generation, files)

    async def prune(self) -> tuple[int, ...]:
        """Removes checkpoints by `checkpoint.keep` and `keep_every`. Returns their steps."""
        keep, keep_every = self._settings.keep, self._settings.keep_every
        await asyncio.to_thread(self._check_lease)
        folder = self._plan.job_folder
        return (await asyncio.to_thread(prune_checkpoints, folder, keep, keep_every)).removed

    def _write_manifest(self, step: int, generation: int, files: Sequence[RankFile]) -> None:
        name, stage = self._plan.spec.name, self._plan.stage
        manifest = make_manifest(name, step, generation, files, stage=stage)
        self._check_lease()
        # Again if there is one: it may be that of a process which took over since then.
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
        """Raises ConfigError if there are finished checkpoints, of which none can be used: to start
        from scratch then is the user's decision."""
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
        """The newest complete one. Warns of unusable newer ones, because their steps are lost."""
        for info in sorted(checkpoints, key=lambda info: info.step, reverse=True):
            if info.is_complete:
                return CheckpointRef(info.step, info.folder)
            if info.status != "unfinished":
                self._warn(f"the checkpoint {info.folder} is skipped: {info.problem}")
        return None

    def _refuse_existing(self, checkpoints: Sequence[CheckpointInfo]) -> None:
        """Raises ConfigError if there are checkpoints of another run: a new run's would not be the
        newest. Unfinished ones are allowed, and with `resume: scratch` damaged ones."""
        resume = self._settings.resume
        harmless = ("unfinished", "damaged") if resume == "scratch" else ("unfinished",)
        existing = [info for info in checkpoints if info.status not in harmless]
        if existing:
            plural = "s" * (len(existing) != 1)
            damage = " that can be used" * (resume == "scratch")
            raise ConfigError(
                f"{self._plan.job_folder} holds {len(existing)} checkpoint{plural}{damage}, "
                f"the newest of step {existing[-1].step}, and checkpoint.resume is {resume}",
                allowed=f"a folder without checkpoints{damage}",
                fix="choose another name or checkpoint.path, set checkpoint.resume: auto, or "
                "remove them" + "; an object store cannot set them aside" * (resume == "scratch"),
            )

    def _resume_from(self, path: str) -> CheckpointRef:
        """A checkpoint by its folder, or the newest of a job's folder. Any other folder may be a
        foreign checkpoint, whose format and step only a worker can determine."""
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
    """Whether two paths or URLs name one folder, however they are written."""
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
