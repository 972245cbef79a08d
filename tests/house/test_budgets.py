"""Budgets of size: what no longer fits in a head is split."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house.source import Function, Module, packages, parse, scripts

# Each figure is the first that is too many.
FILE_LINES = 300
FUNCTION_LINES = 60
CONSTRUCTOR_ARGUMENTS = 8
SELF_ATTRIBUTES = 16

# What may be over a budget, and why: {"<budget> <module>[.<name>]": "<reason>"}.
EXCEPTIONS: dict[str, str] = {}


def over(module: Module) -> Iterator[tuple[str, str]]:
    """(key, figure) of everything in a module that breaks a budget."""
    if module.lines >= FILE_LINES:
        yield f"file {module.name}", f"{module.lines} lines"
    for node in ast.walk(module.tree):
        if isinstance(node, Function):
            yield from _function(module.name, node)
        elif isinstance(node, ast.ClassDef):
            yield from _class(f"{module.name}.{node.name}", node)


def _function(home: str, node: Function) -> Iterator[tuple[str, str]]:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if lines >= FUNCTION_LINES:
        yield f"function {home}.{node.name}", f"{lines} lines"
    bare = [arg.arg for arg in _arguments(node) if arg.annotation is None]
    if bare or (node.returns is None and node.name != "__init__"):
        yield f"annotation {home}.{node.name}", ", ".join(bare) or "return"


def _class(home: str, node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for part in node.body:
        if isinstance(part, Function) and part.name == "__init__":
            count = len(_arguments(part))
            if count >= CONSTRUCTOR_ARGUMENTS:
                yield f"constructor {home}", f"{count} arguments"
    held = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }
    if len(held) >= SELF_ATTRIBUTES:
        yield f"attributes {home}", f"{len(held)} attributes"


def _arguments(node: Function) -> list[ast.arg]:
    spec = node.args
    named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
    stars = [arg for arg in (spec.vararg, spec.kwarg) if arg is not None]
    return [arg for arg in [*named, *stars] if arg.arg not in ("self", "cls")]


def test_everything_is_within_its_budget() -> None:
    found = dict(pair for module in [*packages(), *scripts()] for pair in over(module))
    assert {key: figure for key, figure in found.items() if key not in EXCEPTIONS} == {}


def test_every_exception_is_still_needed_and_has_a_reason() -> None:
    found = dict(pair for module in [*packages(), *scripts()] for pair in over(module))
    assert [key for key in EXCEPTIONS if key not in found] == []
    assert all(EXCEPTIONS.values())


def test_the_door_and_all_three_packages_are_looked_at() -> None:
    names = {module.name for module in packages()}
    assert {"rayzero", "rayzero.__main__", "rayzero.engine", "rayzero.engine.errors"} <= names
    assert {"rayzero.workers", "rayzero.orchestrator"} <= names


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("pass\n" * 300, "file m"),
        ("def f() -> None:\n" + "    pass\n" * 59, "function m.f"),
        ("async def f() -> None:\n" + "    pass\n" * 59, "function m.f"),
        ("def f(a) -> None: ...\n", "annotation m.f"),
        ("def f(*a: int, **b) -> None: ...\n", "annotation m.f"),
        ("def f(a: int): ...\n", "annotation m.f"),
        (
            "class C:\n def __init__(self, a: int, b: int, c: int, d: int,"
            " *, e: int, f: int, g: int, h: int): ...\n",
            "constructor m.C",
        ),
        (
            "class C:\n def f(self) -> None:\n" + "".join(f"  self.a{i} = 0\n" for i in range(16)),
            "attributes m.C",
        ),
    ],
)
def test_what_is_over_a_budget_is_seen(text: str, key: str) -> None:
    assert [found for found, _ in over(parse("m", text))] == [key]


@pytest.mark.parametrize(
    "text",
    [
        "pass\n" * 299,
        "def f() -> None:\n" + "    pass\n" * 58,
        "class C:\n def __init__(self, a: int, b: int, c: int, d: int, *e: int, **f: int): ...",
        "class C:\n def f(self) -> None:\n" + "".join(f"  self.a{i} = 0\n" for i in range(15)),
        "class C:\n @classmethod\n def f(cls, *, a: int) -> None: ...\n",
    ],
)
def test_what_is_within_passes(text: str) -> None:
    assert list(over(parse("m", text))) == []
