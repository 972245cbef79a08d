"""NCCL's settings in a worker's process: set, overridden, refused."""

from __future__ import annotations

import os

import pytest

from rayzero.deepspeed.entry import initialize
from rayzero.engine.errors import ConfigError
from rayzero.workers.messages import Crashed, LogLine
from rayzero.workers.nccl_settings import (
    NCCL_SETTINGS,
    apply_nccl_settings,
    check_nccl_settings,
    contradictions,
)
from tests.workers.support import MakeWorker, begin, poll_until


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in NCCL_SETTINGS:
        for name in filter(None, (setting.name, setting.old_name)):
            monkeypatch.delenv(name, raising=False)


def test_worker_sets_them_and_the_engine_does_not(make_worker: MakeWorker):
    """Under torchrun torch's watchdog is what ends a hang."""
    assert initialize
    assert not [setting for setting in NCCL_SETTINGS if setting.name in os.environ]
    make_worker("returns")
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert all(os.environ[setting.name] == setting.value for setting in NCCL_SETTINGS)


def test_environment_wins():
    environment = {"NCCL_NVLS_ENABLE": "1", "NCCL_ASYNC_ERROR_HANDLING": "3"}
    apply_nccl_settings(environment)
    assert environment["NCCL_NVLS_ENABLE"] == "1"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in environment, "it would hide the old name"
    assert environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    found = [seen for _, seen in contradictions(environment)]
    assert found == ["NCCL_ASYNC_ERROR_HANDLING=3", "NCCL_NVLS_ENABLE=1"]


@pytest.mark.parametrize("value", ["0", "false", "No", ""])
def test_other_words_for_a_value_are_no_contradiction(value: str):
    environment = {"TORCH_NCCL_DUMP_ON_TIMEOUT": value} if value else {}
    assert list(contradictions(environment)) == []


@pytest.mark.parametrize("name", ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"])
def test_blocking_wait_is_refused(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, name: str
):
    check_nccl_settings({name: "0"})
    with pytest.raises(ConfigError, match=f"{name}=1"):
        check_nccl_settings({name: "1"})
    monkeypatch.setenv(name, "1")
    worker = make_worker("returns", gpus=1)
    worker.warm_up()
    begin(worker)
    messages = poll_until(worker.poll, Crashed)
    (crash,) = [message for message in messages if isinstance(message, Crashed)]
    assert crash.kind == "config"
    assert crash.error.startswith(f"{name}=1 in the environment")
    lines = [message.text for message in messages if isinstance(message, LogLine)]
    assert any(line.startswith(f"{name}=1 is set, not 0") for line in lines)
