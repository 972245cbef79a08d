from __future__ import annotations

import asyncio
import time
from threading import Thread

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator import mailbox as mailbox_module
from rayzero.orchestrator.bounds import bounds
from rayzero.orchestrator.clock import SystemClock
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.mailbox import Mailbox, ask, serve
from rayzero.orchestrator.records import HeadLostError
from rayzero.orchestrator.wishes import Answer, Inject, Scale, Wish


class Head:
    """Records without a head."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.living = {"01"}
        self.silent = False

    def get(self, key: str) -> bytes | None:
        self._call()
        return self.held.get(key)

    def put(self, key: str, value: bytes) -> None:
        self._call()
        self.held[key] = value

    def delete(self, key: str) -> None:
        self._call()
        self.held.pop(key, None)

    def keys(self, prefix: str) -> list[str]:
        self._call()
        return sorted(key for key in list(self.held) if key.startswith(prefix))

    def drivers(self) -> frozenset[str]:
        self._call()
        return frozenset(self.living)

    def _call(self) -> None:
        if self.silent:
            raise HeadLostError("the head does not answer")


class Job:
    """A running job whose controller takes at most eight workers."""

    def __init__(self, head: Head, name: str) -> None:
        self.name = name
        self.mailbox = Mailbox(head, name, "01")
        self.said: list[str] = []

    async def grant(self, wish: Wish) -> str:
        match wish:
            case Scale(least, most) if most <= 8:
                return f"{self.name}: {least} to {most} workers; now 2"
            case Scale():
                raise ConfigError("the batch cannot be split over 9 workers")
            case Inject(faults):
                return f"{self.name}: {faults}"

    async def asked(self, heads: list[Head], name: str, wish: Wish) -> str:
        serving = asyncio.create_task(
            serve(self.mailbox, SystemClock(), self.grant, self.said.append)
        )
        try:
            await asyncio.sleep(0.05)
            return await asyncio.to_thread(ask, heads, name, wish)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox_module, "POLL_S", 0.02)
    monkeypatch.setattr(mailbox_module, "ANSWER_S", 0.5)


def test_a_request_reaches_the_job_and_its_answer_comes_back():
    head, other = Head(), Head()
    job = Job(head, "gpt")
    answer = asyncio.run(job.asked([other, head], "gpt", Scale(2, 4)))
    assert answer == "gpt: 2 to 4 workers; now 2"
    assert head.held == {}, "nothing is left behind"


def test_faults_reach_the_job_as_they_were_written():
    head = Head()
    wish = Inject(('kill(rank=1, phase="reduce")', "full_disk()"))
    answer = asyncio.run(Job(head, "gpt").asked([head], "gpt", wish))
    assert answer == f"gpt: {wish.faults}"


def test_a_refusal_is_a_mistake_of_the_user():
    head = Head()
    with pytest.raises(ConfigError, match="cannot be split over 9"):
        asyncio.run(Job(head, "gpt").asked([head], "gpt", Scale(1, 9)))
    assert head.held == {}


def test_several_requests_are_answered_each_to_its_own(monkeypatch: pytest.MonkeyPatch):
    head = Head()
    monkeypatch.setattr(mailbox_module, "ANSWER_S", 5.0)
    job = Job(head, "gpt")
    job.mailbox.open()
    answers: dict[int, str] = {}

    def asker(most: int) -> None:
        answers[most] = ask([head], "gpt", Scale(1, most))

    threads = [Thread(target=asker, args=(most,)) for most in (2, 3, 4)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 5
    while len(answers) < 3 and time.monotonic() < until:
        time.sleep(0.01)
        for request in job.mailbox.take():
            text = asyncio.run(job.grant(request.wish))
            job.mailbox.answer(request, Answer(True, text))
    for thread in threads:
        thread.join()
    assert {most: f"1 to {most} workers" in text for most, text in answers.items()} == {
        2: True,
        3: True,
        4: True,
    }


def test_a_job_that_is_not_running_is_named_with_those_that_are():
    head = Head()
    Job(head, "gpt-small").mailbox.open()
    with pytest.raises(ConfigError) as caught:
        ask([head], "gpt-smal", Scale(1, 2))
    assert "no running job is called 'gpt-smal' (did you mean 'gpt-small'?)" in str(caught.value)
    assert "allowed: a running job: gpt-small" in str(caught.value)


def test_a_job_whose_driver_died_is_not_running():
    head = Head()
    Job(head, "gpt").mailbox.open()
    head.living.clear()
    with pytest.raises(ConfigError, match="no running job is called 'gpt'"):
        ask([head], "gpt", Scale(1, 2))


def test_a_job_that_does_not_answer():
    head = Head()
    job = Job(head, "gpt")
    job.mailbox.open()
    with pytest.raises(JobFailedError, match=r"job 'gpt' did not answer for 0\.5 s"):
        ask([head], "gpt", Scale(1, 2))
    assert job.mailbox.take() == [], "a request nobody waits for is withdrawn"


def test_the_newest_of_two_jobs_of_a_name_is_asked_and_the_older_leaves_it_alone():
    head = Head()
    old, new = Mailbox(head, "gpt", "01"), Mailbox(head, "gpt", "01")
    old.open()
    new.open()
    old.close()
    with pytest.raises(JobFailedError):
        ask([head], "gpt", Scale(1, 2))
    new.close()
    assert head.held == {}


def test_a_head_that_is_away_is_told_once_and_served_again_after():
    async def run() -> None:
        head = Head()
        job = Job(head, "gpt")
        head.silent = True
        serving = asyncio.create_task(serve(job.mailbox, SystemClock(), job.grant, job.said.append))
        await asyncio.sleep(0.2)
        assert job.said == [
            "`rayzero scale` and `chaos` cannot reach this job: the head does not answer"
        ]
        head.silent = False
        await asyncio.sleep(0.1)
        assert (
            await asyncio.to_thread(ask, [head], "gpt", Scale(1, 2)) == "gpt: 1 to 2 workers; now 2"
        )
        head.silent = True
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("wanted", "pair"), [(4, (4, 4)), ("4", (4, 4)), ("2:8", (2, 8)), ((2, 3), (2, 3))]
)
def test_bounds(wanted: int | str | tuple[int, int], pair: tuple[int, int]):
    assert bounds(wanted) == pair


@pytest.mark.parametrize("wanted", [0, -1, "", "0:2", "3:2", "2:", ":2", "2-4", "a", (2, 1)])
def test_what_is_no_number_of_workers(wanted: int | str | tuple[int, int]):
    with pytest.raises(ConfigError, match="is no number of workers"):
        bounds(wanted)
