"""Collectives that a launched script calls between its epochs: kept, and repeated in new processes.

The group's own results are made up here, so that a call which is made again differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rayzero.workers import epoch_calls
from rayzero.workers.epoch_calls import EpochCalls
from rayzero.workers.function_collectives import FunctionCollectives


class Registry:
    """The training state: what another process has captured is delivered where it is registered."""

    def __init__(self, restored: Any = None) -> None:
        self._restored = restored
        self._names: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def register(self, name: str, get: Callable[[], Any], set_value: Callable[[Any], None]) -> None:
        self._names.append(name)
        self.capture = get
        if self._restored is not None:
            set_value(self._restored)


class Rank:
    """A script's process. `made`: the calls that its group has completed."""

    def __init__(self, restored: Any = None, *, is_new: bool = False, notes: bytes = b"") -> None:
        self.registry: Any = Registry(restored)
        self.made: list[str] = []
        read = (lambda: None) if is_new else None
        self.host = FunctionCollectives(0, lambda: True, read)
        self.epochs = self.host.follow_epochs(
            self.registry, lambda: restored is not None, lambda: notes
        )

    def call(self, name: str, value: float, *, shape: tuple[int, ...] = ()) -> float:
        """As `ElasticGroup` does: returns what the script gets."""
        outputs = [torch.full(shape, 0.5)] if name != "barrier" else []
        if self.host.local_reason() or self.host.repeats():
            if self.host.replays(name, outputs):
                return outputs[0].max().item() if outputs else 0.5
            if self.host.local_reason():
                return -1.0
        self.made.append(name)
        for output in outputs:
            output.fill_(value)
        if self.host.records():
            self.host.record(name, outputs)
        return value

    def epoch(self) -> None:
        self.epochs.begin_epoch()
        self.epochs.end_epoch()

    def capture(self) -> Any:
        return self.registry.capture()


def trained(epochs: int) -> Rank:
    """A rank that called a metric, a value on one rank and a barrier after each of its epochs."""
    rank = Rank()
    for epoch in range(1, epochs + 1):
        rank.epoch()
        assert rank.call("allreduce", epoch) == epoch
        rank.call("reduce", epoch)
        rank.call("barrier", 0)
        rank.call("allgather", 10 * epoch, shape=(3,))
    rank.epochs.begin_epoch()
    rank.call("broadcast", 10)  # the order of an epoch
    rank.epochs.begin_step()
    rank.call("allreduce", 99)  # not kept
    return rank


def test_new_rank_gets_what_its_peers_got_and_resumed_ranks_call_the_rest_again() -> None:
    stored = trained(3).capture()
    new = Rank(stored, is_new=True)
    resumed = Rank(stored)
    for epoch in (1, 2, 3):
        new.epoch()
        resumed.epoch()
        for rank, alone in ((new, -1.0), (resumed, 7.0)):
            assert rank.call("allreduce", 7) == epoch
            assert rank.call("reduce", 7) == alone, "a result of one rank"
            rank.call("barrier", 7)
            assert rank.call("allgather", 7, shape=(3,)) == 10 * epoch
            assert rank.call("allreduce", 7) == alone, "nothing more was called"
            assert rank.call("allreduce", 7) == alone
    for rank in (new, resumed):
        rank.epochs.begin_epoch()
        assert rank.call("broadcast", 7) == 10, "the epoch that is continued"
    assert new.made == []
    assert resumed.made == ["reduce", "barrier", "allreduce", "allreduce"] * 3
    for rank in (new, resumed):  # what comes after them is kept for the next process
        again = Rank(rank.capture(), is_new=True)
        again.epoch()
        assert again.call("allreduce", 7) == 1


@pytest.mark.parametrize(
    ("first", "kept"), [(["broadcast"], -1), (["allreduce", "reduce", "barrier"], 1)]
)
def test_call_unlike_the_first_is_made_again(first: list[str], kept: float) -> None:
    """Another collective, after which nothing is repeated; or one of other sizes."""
    resumed = Rank(trained(1).capture())
    resumed.epoch()
    for name in first:
        resumed.call(name, 7)
    assert resumed.call("allgather", 7, shape=(4,)) == 7
    assert resumed.made[-1] == "allgather"
    again = Rank(resumed.capture(), is_new=True)
    again.epoch()
    assert again.call("allreduce", 7) == kept


@pytest.mark.parametrize("is_new", [True, False])
def test_notes_have_what_was_called_after_the_epoch_at_whose_end_the_state_is(
    is_new: bool,
) -> None:
    rank = Rank()
    for epoch in (1, 2, 3):
        rank.epoch()
        state = rank.capture()  # before what follows the epoch
        rank.call("allreduce", epoch)
    rank.epochs.begin_epoch()
    rank.call("broadcast", 10)
    rank.epochs.begin_step()
    notes = rank.epochs.notes()
    assert len(notes) < 300
    again = Rank(state, is_new=is_new, notes=notes)
    for epoch in (1, 2, 3):
        again.epoch()
        assert again.call("allreduce", 7) == epoch
    again.epochs.begin_epoch()
    assert again.call("broadcast", 7) == 10
    rank.epoch()
    assert rank.epochs.notes() == b"", "nothing yet"
    without = Rank(state, is_new=is_new, notes=b"of Trainer's adapter")
    for _ in range(3):
        without.epoch()
        value = without.call("allreduce", 7)
    assert value == (-1 if is_new else 7)


def test_ranks_repeat_a_call_only_if_all_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def gather(is_known: bool) -> list[bool]:
        asked.append(is_known)
        resumed.call("allgather", 0)  # of this question, which is neither kept nor repeated
        return [is_known, False]

    monkeypatch.setattr(epoch_calls, "all_gather_objects", gather)
    resumed = Rank(trained(1).capture())
    resumed.epoch()
    assert resumed.call("allreduce", 7) == 7
    assert asked == [False, True], "where the epoch begins, and after it"
    again = Rank(resumed.capture())
    monkeypatch.setattr(epoch_calls, "all_gather_objects", lambda known: [known])
    again.epoch()
    assert again.call("allreduce", 8) == 7, "the newer one"


def test_rank_that_trains_repeats_nothing() -> None:
    """Its peers may not know the call."""
    rank = Rank(trained(1).capture())
    rank.host._is_resumed = lambda: False
    rank.epoch()
    assert rank.call("allreduce", 7) == 7
    assert rank.made == ["allreduce"]


def test_calls_without_peers_are_forgotten() -> None:
    rank = trained(1)
    outputs = [torch.zeros(())]
    assert not rank.host.requires_peers(outputs), "in a step, which is not counted"
    rank.epoch()
    rank.call("allreduce", 5)
    assert rank.host.requires_peers(outputs)
    assert not rank.host.requires_peers([]), "a barrier"
    assert not rank.host.replays("allreduce", [torch.zeros(())])  # of a broken group
    new = Rank(rank.capture(), is_new=True)
    new.epoch()
    assert new.call("allreduce", 7) == 1
    new.epoch()
    assert not new.host.requires_peers(outputs), "it has none"
    assert new.call("allreduce", 7) == -1


def test_results_are_bounded(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(epoch_calls, "MAX_BYTES", 100)
    calls = EpochCalls()
    large: list[Tensor] = [torch.zeros(60, dtype=torch.uint8)]
    for epoch in (1, 2, 3):
        calls.begin(epoch)
        calls.add(epoch, "allreduce", large)
        calls.add(epoch, "allreduce", [torch.ones(2)])
    assert [epoch in calls for epoch in (1, 2, 3)] == [True, False, False]
    calls.drop(1)
    calls.begin(1)
    calls.add(1, "allreduce", [torch.zeros(2)])
    calls.add(1, "allreduce", [torch.ones(2)])
    assert caplog.text.count("return more than") == 1
    other = EpochCalls()
    other.load(calls.encode())
    kept = other.get(1, 1)
    assert kept is not None
    assert (kept.name, kept.tensors[0].tolist()) == ("allreduce", [1.0, 1.0])
    assert other.get(1, 2) is None
