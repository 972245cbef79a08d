from __future__ import annotations

import pickle

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.workers.crash import crashed
from rayzero.workers.entrypoint import EntryPointError, resolve
from tests.workers import functions


def test_a_function_and_a_static_method_resolve():
    assert resolve("tests.workers.functions:returns") is functions.returns
    assert resolve("tests.workers.functions:Holder.train") is functions.Holder.train
    assert resolve(pickle.dumps(functions.returns)) is functions.returns


@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [
        ("nowhere.at.all:train", "there is no module 'nowhere'"),
        ("tests.workers.nothing:train", "there is no module 'tests.workers.nothing'"),
        ("tests.workers.functions:return", "did you mean 'returns'?"),
        ("tests.workers.functions:Holder.run", "'run' is not in"),
        ("tests.workers.functions:number", "is a int, which is not callable"),
        (pickle.dumps(7), "is a int, which is not callable"),
        (b"garbage", "cannot be unpickled on the worker"),
    ],
)
def test_what_is_wrong_is_said_with_no_traceback_of_ours(entrypoint: str | bytes, words: str):
    with pytest.raises(EntryPointError) as caught:
        resolve(entrypoint)
    assert words in str(caught.value)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("module", "first_frame", "error"),
    [
        ("broken", "VALUE = helper()", "ZeroDivisionError"),
        ("lacking", "import not_installed_anywhere", "ModuleNotFoundError"),
    ],
)
def test_an_error_inside_the_module_is_shown_with_the_users_frames(
    module: str, first_frame: str, error: str
):
    with pytest.raises(EntryPointError, match="does not import") as caught:
        resolve(f"tests.workers.{module}:train")
    message = crashed(caught.value, generation=1, rank=0, step=0)
    assert message.kind == "entrypoint"
    assert error in message.error
    _headline, _file, line, *_ = message.traceback.splitlines()
    assert line.strip().startswith(first_frame)
    assert "importlib" not in message.traceback
