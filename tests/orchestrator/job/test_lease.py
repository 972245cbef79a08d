"""At most one holds a folder, in any order of what the askers do and whoever dies on the way."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayzero.orchestrator.job.lease import (
    AcquireProtocol,
    Claim,
    ClaimState,
    DeleteClaim,
    LeaseOperation,
    ListClaims,
    OtherClaim,
    ProcessIdentity,
    Sleep,
    WriteClaim,
    acquire,
    classify_claim,
)

PROCESS = ProcessIdentity("host", "boot", "space", 1, 1)


def claim(id_: str, **changes: object) -> Claim:
    return replace(Claim(id_, "job", PROCESS, 10.0), **changes)  # type: ignore[arg-type]


@dataclass
class Asker:
    id: str
    way: AcquireProtocol
    next: LeaseOperation | None
    dead: bool = False
    outcome: Claim | None = None

    @property
    def holds(self) -> bool:
        return self.outcome is not None and self.outcome.id == self.id


class Place:
    """A store in which everybody sees what was written before; who is dead is known as such."""

    def __init__(self, ids: list[str]) -> None:
        self.claims: dict[str, Claim] = {}
        ways = {one: acquire(claim(one)) for one in ids}
        self.askers = {one: Asker(one, way, next(way)) for one, way in ways.items()}

    def step(self, asker: Asker) -> None:
        rivals: tuple[OtherClaim, ...] = ()
        match asker.next:
            case WriteClaim(made):
                self.claims[asker.id] = made
            case DeleteClaim(id_):
                self.claims.pop(id_, None)
            case ListClaims():
                rivals = tuple(
                    OtherClaim(one, self.askers[one.id].dead, False, 0.0, 0.0)
                    for one in self.claims.values()
                    if one.id != asker.id
                )
        try:
            asker.next = asker.way.send(rivals)
        except StopIteration as end:
            asker.next, asker.outcome = None, end.value


@settings(max_examples=300)
@given(st.permutations(["1", "2", "3"]), st.data())
def test_one_holds_it_and_one_always_comes_to(ids: list[str], data: st.DataObject):
    place = Place(ids)
    for _ in range(60):
        able = [one for one in place.askers.values() if one.next is not None and not one.dead]
        if not able:
            break
        asker = data.draw(st.sampled_from(able))
        if data.draw(st.integers(0, 19)) == 0:
            asker.dead = True
            continue
        place.step(asker)
        holders = [one for one in place.askers.values() if one.holds and not one.dead]
        assert len(holders) <= 1
    for _ in range(200):  # in turn, so that all come to an end
        for one in place.askers.values():
            if one.next is not None and not one.dead:
                place.step(one)
    alive = [one for one in place.askers.values() if not one.dead]
    assert all(one.outcome is not None for one in alive)
    assert sum(one.holds for one in alive) <= 1
    if alive:
        (holder,) = {one.outcome.id for one in alive if one.outcome is not None}
        assert place.askers[holder].holds


def test_a_later_holder_has_the_greater_epoch():
    place = Place(["1", "2"])
    first, second = place.askers.values()
    while first.next is not None:
        place.step(first)
    first.dead = True
    while second.next is not None:
        place.step(second)
    assert first.outcome is not None
    assert second.outcome is not None
    assert second.outcome.epoch > first.outcome.epoch
    assert list(place.claims) == ["2"]


def test_nobody_waits_where_nobody_is():
    way = acquire(claim("1"))
    assert isinstance(next(way), WriteClaim)
    assert isinstance(way.send(()), ListClaims)
    made = way.send(())
    assert isinstance(made, WriteClaim)
    assert made.claim.holds
    with pytest.raises(StopIteration):
        way.send(())


HOLDER = claim("2", holds=True, epoch=1)


@pytest.mark.parametrize(
    ("rival", "verdict"),
    [
        (OtherClaim(HOLDER, True, False, 0.0, 0.0), ClaimState.LOST),
        (OtherClaim(HOLDER, False, False, 99.0, 99.0), ClaimState.HELD),  # stopped, and there
        (OtherClaim(HOLDER, None, False, 1.0, 1.0), ClaimState.UNDECIDED),
        (OtherClaim(HOLDER, None, True, 1.0, 1.0), ClaimState.HELD),
        (OtherClaim(HOLDER, None, False, 10.1, 10.1), ClaimState.LOST),
        (
            OtherClaim(HOLDER, None, False, 0.0, 13.1),
            ClaimState.LOST,
        ),  # for long before it was seen
        (OtherClaim(claim("0"), None, False, 0.0, 0.0), ClaimState.BACK_OFF),
        (OtherClaim(claim("2"), None, False, 0.0, 0.0), ClaimState.UNDECIDED),
        (OtherClaim(claim("0"), None, False, 10.1, 10.1), ClaimState.LOST),
    ],
)
def test_what_is_thought_of_a_rival(rival: OtherClaim, verdict: ClaimState):
    assert classify_claim(rival, claim("1")) is verdict


def test_a_pause_names_whom_it_is_for():
    way = acquire(claim("1"))
    next(way)
    way.send(())
    pause = way.send((OtherClaim(HOLDER, None, False, 1.0, 1.0),))
    assert pause == Sleep(HOLDER)
