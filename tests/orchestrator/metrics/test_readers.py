"""An end waits for those who read regularly, and for nobody else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rayzero.orchestrator.metrics.endpoint import MAX_END_WAIT_S, ScrapeSchedule


def told(*times: float, what: str = "/metrics") -> ScrapeSchedule:
    readers = ScrapeSchedule()
    for now_s in times:
        readers.record_scrape(what, now_s)
    return readers


@pytest.mark.parametrize("times", [(), (99,), (95, 99), (10, 80, 99), (1, 2, 3)])
def test_it_waits_for_nobody_in_particular(times: Sequence[float]) -> None:
    assert told(*times).wait_deadline_s(100) == 100


def test_it_waits_a_little_longer_than_the_usual_interval() -> None:
    assert told(80, 85, 90, 95).wait_deadline_s(96) == pytest.approx(103)
    assert told(60, 75, 90).wait_deadline_s(100) == pytest.approx(113)


def test_two_who_read_the_same_are_both_waited_for() -> None:
    assert told(60, 61, 75, 76, 90, 91).wait_deadline_s(92) >= 105


def test_it_does_not_wait_for_long() -> None:
    assert told(0, 50, 99).wait_deadline_s(100) == 100 + MAX_END_WAIT_S


def test_who_has_read_the_end_is_not_waited_for() -> None:
    readers = told(80, 85, 90, 95)
    readers.record_scrape("/metrics", 100.5)
    assert readers.wait_deadline_s(100) == 100


def test_each_thing_has_its_own_readers() -> None:
    readers = told(80, 85, 90, 95)
    for now_s in (93, 94, 95, 96):
        readers.record_scrape("/snapshot.json", now_s)
    readers.record_scrape("/snapshot.json", 100.5)
    assert readers.wait_deadline_s(100) > 100
