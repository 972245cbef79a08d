"""Error classes: message parts, pickling, formatting, redacted credentials and settings."""

from __future__ import annotations

import copy
import pickle

import pytest
from pydantic import BaseModel

from rayzero.engine import errors
from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.store import open_store
from rayzero.engine.errors import (
    CollectiveError,
    ConfigError,
    DataError,
    EngineError,
    RayzeroError,
    did_you_mean,
    first_line,
)
from rayzero.engine.redact import redact_url
from rayzero.engine.validation import validate_document

ALL = [RayzeroError, ConfigError, EngineError, DataError, CollectiveError]


def test_all_errors_are_listed() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert {cls for cls in classes if cls.__module__ == errors.__name__} == set(ALL)
    assert all(issubclass(cls, RayzeroError) for cls in ALL)


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("parts", [("s",), ("s", "a", "f"), ("s", "", "f")])
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


URL = "s3://AKIA:p4ss@bucket/runs?secret_key=p4ss&region=eu"


@pytest.mark.parametrize(
    "error",
    [
        RayzeroError(URL, URL, URL),
        ConfigError(f"{URL}: no"),
        StoreError("gone", URL, f"{URL}: x"),
    ],
)
def test_errors_redact_urls(error: RayzeroError):
    for each in (error, pickle.loads(pickle.dumps(error))):
        text = f"{each} {each!r} {each.seen} {each.args}"
        assert "p4ss" not in text
        assert "s3://***@bucket/runs" in text
        assert "region=eu" in text
        assert redact_url(text) == text


@pytest.mark.parametrize("url", [URL.replace("s3:", "ftp:"), URL + "&no_such_option=1"])
def test_store_errors_redact_urls(url: str):
    with pytest.raises(RayzeroError) as caught:
        open_store(url).list_folder()
    assert "p4ss" not in str(caught.value)
    assert "bucket/runs" in str(caught.value)


class Settings(BaseModel):
    api_key: int
    url: int


def test_validation_errors_redact_secret_fields():
    with pytest.raises(ConfigError) as caught:
        validate_document(Settings, {"api_key": "p4ss", "url": URL}, "settings")
    assert "api_key" in str(caught.value)
    assert "p4ss" not in str(caught.value)
