from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from functools import partial

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.workers.crash import describe_crash
from rayzero.workers.entrypoint import EntryPointError, load_train_function, resolve_entrypoint
from tests.workers import functions


def test_function_and_static_method_resolve():
    assert resolve_entrypoint("tests.workers.functions:returns") is functions.returns
    assert resolve_entrypoint("tests.workers.functions:Holder.train") is functions.Holder.train
    assert resolve_entrypoint(pickle.dumps(functions.returns)) is functions.returns


@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [
        ("nowhere.at.all:train", "no module named 'nowhere'"),
        ("tests.workers.nothing:train", "no module named 'tests.workers.nothing'"),
        ("tests.workers.functions:return", "did you mean 'returns'?"),
        ("tests.workers.functions:Holder.run", "'run' is not in"),
        ("tests.workers.functions:number", "is of type int, which is not callable"),
        (pickle.dumps(7), "is of type int, which is not callable"),
        (b"garbage", "cannot be unpickled on the worker"),
    ],
)
def test_invalid_entry_point_is_reported_without_traceback(entrypoint: str | bytes, words: str):
    with pytest.raises(EntryPointError) as caught:
        resolve_entrypoint(entrypoint)
    assert words in str(caught.value)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("module", "first_frame", "error"),
    [
        ("broken", "VALUE = helper(None)", "ZeroDivisionError"),
        ("missing_import", "import not_installed_anywhere", "ModuleNotFoundError"),
        ("reads_arguments", "ARGUMENTS = ", "sys.exit(2)"),
    ],
)
def test_import_error_shows_user_frames(module: str, first_frame: str, error: str):
    with pytest.raises(EntryPointError, match="cannot be imported") as caught:
        resolve_entrypoint(f"tests.workers.{module}:train")
    message = describe_crash(caught.value, generation=1, rank=0, step=0)
    assert message.kind == "entrypoint"
    assert error in message.error
    _headline, _file, line, *_ = message.traceback.splitlines()
    assert line.strip().startswith(first_frame)
    assert "importlib" not in message.traceback


def test_missing_module_names_the_folder_of_imports():
    with pytest.raises(EntryPointError, match=re.escape(f"imported from {os.getcwd()}")):
        resolve_entrypoint("nowhere:train")


def no_arguments() -> None: ...


def two_arguments(ctx: object, other: object) -> None: ...


async def a_coroutine(ctx: object) -> None: ...


def a_generator(ctx: object) -> Iterator[int]:
    yield 1


def one_and_more(ctx: object = None, *others: object, **named: object) -> None: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_arguments, "cannot be called with ctx as its only argument: too many"),
        (two_arguments, "missing a required argument: 'other'"),
    ],
)
def test_function_signature_is_checked(function, words: str):
    with pytest.raises(EntryPointError) as caught:
        load_train_function(pickle.dumps(function))
    assert words in caught.value.seen
    assert "ctx.args" in caught.value.allowed


@pytest.mark.parametrize("function", [a_coroutine, a_generator])
def test_function_that_returns_before_it_trains_is_refused(function):
    with pytest.raises(
        EntryPointError, match=f"returns {function.__name__.replace('_', ' ')} inst"
    ):
        load_train_function(pickle.dumps(function))


@pytest.mark.parametrize("function", [one_and_more, print, partial(two_arguments, other=1)])
def test_any_callable_that_accepts_ctx_is_valid(function):
    assert callable(load_train_function(pickle.dumps(function)))
