"""Errors redact credentials in URLs and secret settings."""

from __future__ import annotations

import pickle

import pytest
from pydantic import BaseModel

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.store import open_store
from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.engine.redact import redact_url
from rayzero.engine.validation import validate_document

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
    for copy in (error, pickle.loads(pickle.dumps(error))):
        text = f"{copy} {copy!r} {copy.seen} {copy.args}"
        assert "p4ss" not in text
        assert "s3://***@bucket/runs" in text
        assert "region=eu" in text


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


def test_redaction_is_idempotent():
    assert redact_url(redact_url(URL)) == redact_url(URL)
