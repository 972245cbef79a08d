"""Size limits of files, functions, constructors and classes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house.source import Function, Module, packages, parse, scripts

# Exclusive limits.
FILE_LINES = 400
FUNCTION_LINES = 60
CONSTRUCTOR_ARGUMENTS = 11
SELF_ATTRIBUTES = 16

# Permitted violations: {"<budget> <module>[.<name>]": "<reason>"}.
EXCEPTIONS: dict[str, str] = {}


def violations(module: Module) -> Iterator[tuple[str, str]]:
    """(key, size) of every violation in a module."""
    if module.lines >= FILE_LINES:
        yield f"file {module.name}", f"{module.lines} lines"
    for node in ast.walk(module.tree):
        if isinstance(node, Function):
            yield from _function_violations(module.name, node)
        elif isinstance(node, ast.ClassDef):
            yield from _class_violations(f"{module.name}.{node.name}", node)


def _function_violations(module: str, node: Function) -> Iterator[tuple[str, str]]:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if lines >= FUNCTION_LINES:
        yield f"function {module}.{node.name}", f"{lines} lines"
    unannotated = [arg.arg for arg in _arguments(node) if arg.annotation is None]
    if unannotated or (node.returns is None and node.name != "__init__"):
        yield f"annotation {module}.{node.name}", ", ".join(unannotated) or "return"


def _class_violations(name: str, node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for part in node.body:
        if isinstance(part, Function) and part.name == "__init__":
            count = len(_arguments(part))
            if count >= CONSTRUCTOR_ARGUMENTS:
                yield f"constructor {name}", f"{count} arguments"
    attributes = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }
    if len(attributes) >= SELF_ATTRIBUTES:
        yield f"attributes {name}", f"{len(attributes)} attributes"


def _arguments(node: Function) -> list[ast.arg]:
    spec = node.args
    named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
    variadic = [arg for arg in (spec.vararg, spec.kwarg) if arg is not None]
    return [arg for arg in [*named, *variadic] if arg.arg not in ("self", "cls")]


def all_violations() -> dict[str, str]:
    return dict(pair for module in [*packages(), *scripts()] for pair in violations(module))


def test_no_limit_is_exceeded() -> None:
    assert {key: size for key, size in all_violations().items() if key not in EXCEPTIONS} == {}


def test_exceptions_are_needed_and_have_reasons() -> None:
    assert [key for key in EXCEPTIONS if key not in all_violations()] == []
    assert all(EXCEPTIONS.values())


def test_all_packages_are_checked() -> None:
    names = {module.name for module in packages()}
    assert {"rayzero", "rayzero.__main__", "rayzero.engine", "rayzero.engine.errors"} <= names
    assert {"rayzero.workers", "rayzero.orchestrator"} <= names


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("pass\n" * FILE_LINES, "file m"),
        ("def f() -> None:\n" + "    pass\n" * 59, "function m.f"),
        ("async def f() -> None:\n" + "    pass\n" * 59, "function m.f"),
        ("def f(a) -> None: ...\n", "annotation m.f"),
        ("def f(*a: int, **b) -> None: ...\n", "annotation m.f"),
        ("def f(a: int): ...\n", "annotation m.f"),
        (
            "class C:\n def __init__(self, a: int, b: int, c: int, d: int,"
            " *, e: int, f: int, g: int, h: int, i: int, j: int, k: int): ...\n",
            "constructor m.C",
        ),
        (
            "class C:\n def f(self) -> None:\n" + "".join(f"  self.a{i} = 0\n" for i in range(16)),
            "attributes m.C",
        ),
    ],
)
def test_violation_is_detected(text: str, key: str) -> None:
    assert [violated for violated, _ in violations(parse("m", text))] == [key]


@pytest.mark.parametrize(
    "text",
    [
        "pass\n" * (FILE_LINES - 1),
        "def f() -> None:\n" + "    pass\n" * 58,
        "class C:\n def __init__(self, a: int, b: int, c: int, d: int, *e: int, **f: int): ...",
        "class C:\n def f(self) -> None:\n" + "".join(f"  self.a{i} = 0\n" for i in range(15)),
        "class C:\n @classmethod\n def f(cls, *, a: int) -> None: ...\n",
    ],
)
def test_code_within_limits_passes(text: str) -> None:
    assert list(violations(parse("m", text))) == []
