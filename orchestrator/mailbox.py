"""How a command reaches a running job: requests and answers as records in the cluster's head.

A job keeps the record `job/NAME`, which names its run. A request is a record under that run's name;
the job looks once a second, removes it, and leaves an answer for whoever asked.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from rayzero.engine.errors import ConfigError, RayzeroError, nearest
from rayzero.orchestrator.clock import Clock
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.records import HeadLostError, Records
from rayzero.orchestrator.wishes import Answer, Inject, Scale, Wish

POLL_S = 1.0
"""How often a job looks for requests."""
ANSWER_S = 15.0
"""How long a command waits for a job's answer: recovery may keep the job busy."""
_LOOK_S = 0.1


_KINDS: Mapping[str, type[Wish]] = {"scale": Scale, "inject": Inject}


@dataclass(frozen=True)
class Request:
    """A wish, by one command; as a record `{"id": ..., "kind": ..., "wish": {...}}`."""

    id: str
    wish: Wish

    def encode(self) -> bytes:
        (kind,) = (kind for kind, one in _KINDS.items() if isinstance(self.wish, one))
        return json.dumps({"id": self.id, "kind": kind, "wish": asdict(self.wish)}).encode()

    @classmethod
    def decode(cls, record: bytes) -> Request:
        found = json.loads(record)
        fields = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in found["wish"].items()
        }
        made: Any = _KINDS[found["kind"]]
        return cls(found["id"], made(**fields))


class Mailbox:
    """A running job's side. Each call may take a round trip to the head, and raise HeadLostError.

    Args:
        name: the job's.
        driver: the id of the Ray job that it runs in; when that is over, so is the job.
    """

    def __init__(self, records: Records, name: str, driver: str) -> None:
        self._records = records
        self._name = name
        self._driver = driver
        self._run = secrets.token_hex(8)

    def open(self) -> None:
        """From now on commands find the job; the last one of a name gets the requests."""
        record = {"run": self._run, "driver": self._driver}
        self._records.put(_job(self._name), json.dumps(record).encode())

    def take(self) -> list[Request]:
        """The requests that came since the last time, oldest first."""
        taken = []
        for key in self._records.keys(_asked(self._run)):
            value = self._records.get(key)
            self._records.delete(key)
            if value is not None:
                taken.append(Request.decode(value))
        return taken

    def answer(self, request: Request, answer: Answer) -> None:
        self._records.put(_answered(self._run, request.id), json.dumps(asdict(answer)).encode())

    def close(self) -> None:
        """Commands no longer find the job."""
        found = self._records.get(_job(self._name))
        if found is not None and json.loads(found)["run"] == self._run:
            self._records.delete(_job(self._name))
        for key in self._records.keys(_asked(self._run)):
            self._records.delete(key)


async def serve(
    mailbox: Mailbox,
    clock: Clock,
    grant: Callable[[Wish], Awaitable[str]],
    tell: Callable[[str], None],
) -> None:
    """Answers requests until it is cancelled. A head that is away for a while is told once.

    Args:
        grant: does what is wanted and says what comes of it; raises RayzeroError when it cannot
            be.
        tell: shows a warning.
    """
    is_open = silent = False
    try:
        while True:
            try:
                if not is_open:
                    await asyncio.to_thread(mailbox.open)
                    is_open = True
                for request in await asyncio.to_thread(mailbox.take):
                    answer = await _decided(grant, request)
                    await asyncio.to_thread(mailbox.answer, request, answer)
                silent = False
            except HeadLostError as lost:
                if not silent:
                    tell(f"`rayzero scale` and `chaos` cannot reach this job: {lost.seen}")
                silent = True
            await clock.sleep(POLL_S)
    finally:
        with suppress(HeadLostError):  # then the records are gone with it
            mailbox.close()


def ask(heads: Sequence[Records], name: str, wish: Wish) -> str:
    """A command's side: asks the running job of that name; its answer, in words.

    Args:
        heads: of the clusters to look for the job in.

    Raises:
        ConfigError: no job of that name is running there, or it cannot do that.
        JobFailedError: it does not answer.
    """
    running: list[str] = []
    for records in heads:
        found = _running(records)
        if name in found:
            return _asked_of(records, found[name], name, wish)
        running += found
    raise ConfigError(
        f"no running job is called {name!r}{nearest(name, running)}",
        allowed=f"a running job: {', '.join(sorted(running))}" if running else "",
        fix="the name, or --address or RAY_ADDRESS, which say in which cluster to look",
    )


def _asked_of(records: Records, run: str, name: str, wish: Wish) -> str:
    request = Request(f"{time.time_ns():020d}-{secrets.token_hex(4)}", wish)
    answered, asked = _answered(run, request.id), _asked(run) + request.id
    records.put(asked, request.encode())
    try:
        until = time.monotonic() + ANSWER_S
        while (value := records.get(answered)) is None:
            if time.monotonic() > until:
                raise JobFailedError(
                    f"job {name!r} did not answer for {ANSWER_S:g} s",
                    fix="look at what it prints; it may have just ended",
                )
            time.sleep(_LOOK_S)
        answer = Answer(**json.loads(value))
    finally:
        records.delete(asked)
        records.delete(answered)
    if not answer.done:
        raise ConfigError(answer.text)
    return answer.text


async def _decided(grant: Callable[[Wish], Awaitable[str]], request: Request) -> Answer:
    try:
        return Answer(True, await grant(request.wish))
    except RayzeroError as error:
        return Answer(False, str(error))


def _running(records: Records) -> dict[str, str]:
    """The run of every job whose driver lives, by the job's name."""
    drivers, found = records.drivers(), {}
    for key in records.keys(_job("")):
        value = records.get(key)
        record = json.loads(value) if value else {"driver": ""}
        if record["driver"] in drivers:
            found[key.removeprefix(_job(""))] = str(record["run"])
    return found


def _job(name: str) -> str:
    return f"job/{name}"


def _asked(run: str) -> str:
    return f"ask/{run}/"


def _answered(run: str, request: str) -> str:
    return f"answer/{run}/{request}"
