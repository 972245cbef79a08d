"""A mistake in `entrypoint` is found in the source, without an import."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from rayzero.orchestrator.job.entrypoint_check import _signature, check_early, check_entrypoint
from rayzero.workers.entrypoint import EntryPointError
from tests.orchestrator.support import plan

SOURCE = """
raise RuntimeError("imported")
from typing import Protocol as Shape
import os.path
if True:
    def train(ctx): ...
else:
    from somewhere import train_slowly
for name in ("a", "b"):
    globals_of_mine = {}
class Trainer:
    @staticmethod
    def run(ctx): ...
    def step(self, ctx): ...
evaluate, other = 1, 2
number: int = 3
settings = {"lr": 1}
chosen = settings
def two(ctx, other, *, key): ...
def nothing(): ...
def rest(ctx, /, other=settings["lr"], *more, key=None, **named): ...
async def later(ctx): ...
def parts(ctx):
    with open(ctx) as file:
        yield file
def plain(ctx):
    def inner():
        yield 1
    return [(yield_) for yield_ in inner()]
@partial(print)
def wrapped(): ...
def replaced(): ...
replaced = wrapped(replaced)
if number:
    def either(): ...
def either(ctx): ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "gpt.py").write_text(SOURCE)
    (tmp_path / "dynamic.py").write_text("globals()['train'] = print")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "model.py").write_text("")
    (tmp_path / "lazy").mkdir()
    (tmp_path / "lazy" / "__init__.py").write_text("__path__.append('elsewhere')")
    (tmp_path / "star.py").write_text("from jobs.gpt import *")
    (tmp_path / "broken.py").write_text("def train(ctx:")
    return str(tmp_path)


@pytest.mark.parametrize(
    "name",
    (
        "train train_slowly Trainer.run evaluate Shape chosen rest plain wrapped replaced either"
    ).split(),
)
def test_defined_names_are_accepted(folder: str, name: str):
    check_entrypoint(f"jobs.gpt:{name}", folder, only_here=True)


@pytest.mark.parametrize(
    "module",
    ["dynamic", "star", "json", "rayzero.cli_of_mine", "lazy.train", "jobs.other"],
)
def test_what_the_source_does_not_tell_is_left_to_the_workers(folder: str, module: str):
    check_entrypoint(f"{module}:train", folder, only_here=True)


@pytest.mark.parametrize("only_here", [True, False])
def test_syntax_error_is_found(folder: str, only_here: bool):
    with pytest.raises(
        EntryPointError, match=r"broken.py:1: '\(' was never closed: def train\(ctx:"
    ):
        check_entrypoint("broken:train", folder, only_here=only_here)


def test_misspelt_function_is_found(folder: str):
    with pytest.raises(EntryPointError, match=r"'trian' is not in .*gpt.py.*did you mean 'train'"):
        check_entrypoint("jobs.gpt:trian", folder, only_here=False)


def test_name_in_the_job_is_checked_before_anything_starts(folder: str):
    spec = plan(Path(folder), entrypoint="jobs.gpt:trian").spec
    with pytest.raises(EntryPointError, match="did you mean 'train'"):
        check_early(spec, folder, has_function=False)
    check_early(spec, folder, has_function=True)


def test_missing_module_is_found_on_the_machine_of_the_workers(folder: str):
    with pytest.raises(EntryPointError, match="no module named 'jbos'"):
        check_entrypoint("jbos.gpt:train", folder, only_here=True)
    check_entrypoint("jbos.gpt:train", folder, only_here=False)


@pytest.mark.parametrize("only_here", [True, False])
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("package.modl", "no module named 'package.modl' .did you mean 'package.model'"),
        ("package.model.part", "no module named 'package.model.part'"),
        ("star.part", "no module named 'star.part'"),
    ],
)
def test_missing_module_of_a_package_is_found(
    folder: str, module: str, words: str, only_here: bool
):
    with pytest.raises(EntryPointError, match=words):
        check_entrypoint(f"{module}:train", folder, only_here=only_here)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("two", "two(ctx, other, *, key) cannot be called with ctx as its only argument: missing"),
        ("nothing", "nothing() cannot be called with ctx as its only argument: too many"),
        ("Trainer.step", "step(self, ctx) cannot be called with ctx as its only argument"),
        ("later", "later returns a coroutine instead of training"),
        ("parts", "parts returns a generator instead of training"),
        ("number", "'jobs.gpt:number' is of type int, which is not callable"),
        ("settings", "'jobs.gpt:settings' is of type dict, which is not callable"),
    ],
)
def test_what_cannot_be_called_with_ctx_is_found(folder: str, name: str, words: str):
    with pytest.raises(EntryPointError) as raised:
        check_entrypoint(f"jobs.gpt:{name}", folder, only_here=False)
    assert words in raised.value.seen


def test_signatures_are_those_of_the_imported_function():
    """The oracle is Python's own."""
    source = "def f(a, /, b, c=1, *d, e, g=(2, 3), **h): ...\ndef k(a, *, b=None): ...\n"
    names: dict[str, object] = {}
    exec(source, names)
    for node in ast.parse(source).body:
        assert isinstance(node, ast.FunctionDef)
        assert str(_signature(node.args)) == str(inspect.signature(names[node.name]))  # type: ignore[arg-type]
