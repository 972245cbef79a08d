from __future__ import annotations

import pytest
import torch.distributed as dist

from rayzero.engine.errors import CollectiveError, ConfigError, DataError, EngineError
from rayzero.workers.training_thread import describe_crash

GLOO = "[.../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44712."


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001
        return raised


@pytest.mark.parametrize(
    ("error", "kind", "has_traceback"),
    [
        (ConfigError("wrong"), "config", False),
        (DataError("empty"), "data", False),
        (EngineError("misused"), "user", True),
        (CollectiveError("peer"), "collective", True),
        (RuntimeError(GLOO), "collective", True),
        (dist.DistNetworkError("timed out"), "collective", True),
        (RuntimeError("shapes differ"), "user", True),
        (KeyError("x"), "user", True),
        (SystemExit(3), "user", True),
    ],
)
def test_an_exception_says_what_it_is_about(error: Exception, kind: str, has_traceback: bool):
    message = describe_crash(caught(error), generation=2, rank=1, step=7)
    assert (message.generation, message.rank, message.step) == (2, 1, 7)
    assert message.kind == kind
    assert bool(message.traceback) == has_traceback
    if has_traceback:
        assert "raise error" in message.traceback


def test_user_code_that_wraps_a_failed_collective_does_not_hide_it():
    error = ValueError("training failed")
    error.__context__ = RuntimeError(GLOO)
    assert describe_crash(caught(error), 1, 0, 1).kind == "collective"


def test_sys_exit_is_told_in_words():
    assert describe_crash(caught(SystemExit(3)), 1, 0, 1).error == (
        "the training function called sys.exit(3)"
    )
