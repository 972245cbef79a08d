"""Error classes: message parts, pickling, formatting."""

from __future__ import annotations

import copy
import pickle

import pytest

from rayzero.engine import errors
from rayzero.engine.errors import (
    CollectiveError,
    ConfigError,
    DataError,
    EngineError,
    RayzeroError,
    did_you_mean,
    first_line,
)

ALL = [RayzeroError, ConfigError, EngineError, DataError, CollectiveError]


def test_all_errors_are_listed() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert {cls for cls in classes if cls.__module__ == errors.__name__} == set(ALL)
    assert all(issubclass(cls, RayzeroError) for cls in ALL)


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("parts", [("s",), ("s", "a"), ("s", "a", "f"), ("s", "", "f")])
def test_pickle_round_trip(cls: type[RayzeroError], parts: tuple[str, ...]) -> None:
    error = cls(*parts)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is cls
        assert (other.seen, other.allowed, other.fix) == (error.seen, error.allowed, error.fix)
        assert str(other) == str(error)
        assert other.args == error.args


def test_message_has_a_line_per_part() -> None:
    assert str(ConfigError("lr is -1")) == "lr is -1"
    assert str(ConfigError("lr is -1", fix="optimizer.params.lr")) == (
        "lr is -1\n  fix: optimizer.params.lr"
    )
    assert str(ConfigError("lr is -1", "0 or more", "optimizer.params.lr")) == (
        "lr is -1\n  allowed: 0 or more\n  fix: optimizer.params.lr"
    )


def test_did_you_mean() -> None:
    words = ["stage", "overlap_comm"]
    assert did_you_mean("stge", words) == " (did you mean 'stage'?)"
    assert did_you_mean("overlap", words) == " (did you mean 'overlap_comm'?)"
    assert did_you_mean("zebra", words) == ""
    assert did_you_mean("stage", []) == ""


def test_first_line_is_never_empty() -> None:
    assert first_line(ConfigError("two\nlines", fix="x")) == "two"
    assert (
        first_line(OSError(28, "No space left on device")) == "[Errno 28] No space left on device"
    )
    assert first_line(ConnectionError()) == "ConnectionError"
    assert first_line(ValueError("\n ")) == "ValueError"
