"""Specs and assignments for worker tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from rayzero.workers.chaos.inject import FaultRecord, FaultSchedule, WorkerFaultInjector
from rayzero.workers.chaos.spec import parse_fault
from rayzero.workers.function_collectives import FunctionCollectives
from rayzero.workers.membership import Membership, SessionHost
from rayzero.workers.messages import (
    Assignment,
    GenerationSpec,
    MirrorPolicy,
    RankAssignment,
    WorkerMessage,
    WorkerSpec,
)
from rayzero.workers.retained_state import RetainedState
from rayzero.workers.session import JobSession
from rayzero.workers.training_thread import GenerationChannel
from rayzero.workers.vault.records import Restore
from rayzero.workers.worker import WorkerProcess

SETUP = WorkerSpec(
    name="job",
    entrypoint="tests.workers.functions:returns",
    args={"width": 8},
    seed=3,
    steps=5,
    output_dir="runs/job",
    engine_config=None,
    cpus=1,
    gpus=0,
    patience_s=20,
    working_dir=".",
    import_paths=(),
    mirror=MirrorPolicy(),
)
ASSIGN = Assignment(
    generation=1,
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    store_host="127.0.0.1",
    store_port=0,
    vault="",
)


def setup(faults: Sequence[str] = (), **changes: Any) -> WorkerSpec:
    return replace(SETUP, faults=tuple(map(parse_fault, faults)), **changes)


def mirrored_setup(folder: Path, entrypoint: str, **changes: Any) -> WorkerSpec:
    """A job that mirrors each step and keeps a ledger in `folder`."""
    defaults: dict[str, Any] = {
        "entrypoint": entrypoint,
        "output_dir": str(folder),
        "working_dir": os.getcwd(),
        "args": {},
        "mirror": MirrorPolicy(replicas=1, every_steps=1),
        "ledger": True,
    }
    return setup(**(defaults | changes))


def poll_until(
    poll: Callable[[float], list[WorkerMessage]], last: type[WorkerMessage], rounds: int = 60
) -> list[WorkerMessage]:
    """All messages up to the first of type `last`."""
    messages: list[WorkerMessage] = []
    for _ in range(rounds):
        messages += poll(0.5)
        if any(isinstance(message, last) for message in messages):
            return messages
    raise AssertionError(f"no {last.__name__} in {messages}")


class GivenUp(BaseException):
    """In a test, in place of a thread that waits for the end of its process."""


def give_up() -> NoReturn:
    raise GivenUp


MakeWorker = Callable[..., WorkerProcess]
StartWorkers = Callable[..., Any]  # LocalWorkers


def run_until(
    make_worker: MakeWorker, entrypoint: str, last: type[WorkerMessage], **changes: Any
) -> tuple[WorkerProcess, list[WorkerMessage]]:
    """A new worker that runs generation 1, with its messages up to the first of type `last`."""
    worker = make_worker(entrypoint, **changes)
    begin(worker)
    return worker, poll_until(worker.poll, last)


def begin(worker: WorkerProcess, generation: int = 1) -> None:
    port = worker.open_store()
    worker.assign(
        GenerationSpec(generation, 1, "127.0.0.1", port), RankAssignment(0, 0, 1, vault="")
    )


class NoHost(SessionHost):
    """Of a function that is in one generation only."""


def session(
    restore: Restore | None = None, **changes: Any
) -> tuple[JobSession, GenerationChannel, list[WorkerMessage]]:
    posted: list[WorkerMessage] = []
    channel = GenerationChannel(posted.append, 1, 0, give_up)
    injector = WorkerFaultInjector(FaultSchedule(FaultRecord("/nowhere"), posted.append), 0)
    job = JobSession(
        setup(**changes),
        Membership(replace(ASSIGN, restore=restore), channel, injector),
        RetainedState(0, 10.0),
        NoHost(),
        FunctionCollectives(0, channel.interrupt.is_set),
    )
    return job, channel, posted
