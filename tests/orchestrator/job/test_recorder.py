"""The event buffer: clients poll independently, and learn how many events were dropped."""

from __future__ import annotations

import asyncio

from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.job import recorder as recorder_module
from rayzero.orchestrator.job.recorder import LATEST, EventBuffer
from rayzero.orchestrator.job_events import JobWarning, StateEntered
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.results import EndedJob, JobStatus
from rayzero.workers import bounded_queue
from rayzero.workers.messages import LogLine


async def test_event_pages_are_ordered_and_end():
    buffer = EventBuffer(max_page_events=3)
    for number in range(7):
        buffer.on_event(JobWarning(str(number)))
    buffer.finish(EndedJob(JobStatus("job", State.STOPPED), JobStoppedError("s")))
    texts, since, pages = [], 0, 0
    while True:
        page = await buffer.fetch_since(buffer.run, since, 1.0)
        texts += [event.text for event in page.events if isinstance(event, JobWarning)]
        since, pages = page.next_index, pages + 1
        if page.ended is not None:
            break
    assert (texts, pages) == ([str(number) for number in range(7)], 3)


async def test_slow_client_receives_number_of_dropped_events():
    buffer = EventBuffer(max_events=4)
    for number in range(10):
        buffer.on_event(JobWarning(str(number)))
    page = await buffer.fetch_since("", 1, 1.0)
    assert (page.dropped, [event.text for event in page.events]) == (5, ["6", "7", "8", "9"])
    assert (await buffer.fetch_since("another process", 99, 1.0)).dropped == 6


async def test_late_client_receives_latest_state_and_later_events():
    buffer = EventBuffer()
    for state in (State.STARTING, State.RUNNING):
        buffer.on_event(StateEntered(state, 1, 2))
    buffer.on_event(JobWarning("old"))
    page = await buffer.fetch_since("", LATEST, 1.0)
    assert page.events == (StateEntered(State.RUNNING, 1, 2),)
    waiting = asyncio.ensure_future(buffer.fetch_since(page.run, page.next_index, 5.0))
    await asyncio.sleep(0)
    buffer.on_event(JobWarning("new"))
    assert (await waiting).events == (JobWarning("new"),)
    assert (await buffer.fetch_since(page.run, page.next_index + 1, 0.01)).events == ()


async def test_events_and_pages_are_bounded_by_bytes():
    buffer = EventBuffer()
    for number in range(10_000):
        buffer.on_event(LogLine(0, "stdout", f"{number:010000}"))
    since, kept = 0, 0
    while since < 10_000:
        page = await buffer.fetch_since(buffer.run, since, 1.0)
        assert 0 < 10_000 * len(page.events) <= recorder_module.MAX_PAGE_BYTES
        assert page.next_index == since + page.dropped + len(page.events)
        since, kept = page.next_index, kept + len(page.events)
    assert 10_000 * kept <= bounded_queue.MAX_BYTES
