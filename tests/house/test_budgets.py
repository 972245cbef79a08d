"""Limits of sizes, and rules for the structure of packages."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.house.source import Function, Module, import_graph, packages, parse, scripts

# Exclusive limits.
FILE_LINES = 400
FUNCTION_LINES = 60
CONSTRUCTOR_ARGUMENTS = 11
SELF_ATTRIBUTES = 16
RECORD_FIELDS = 17
SMALL_FILE_LINES = 60
SMALL_FILES = 6
"""How many of them may have one importer."""
ARGUMENTS = 9


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


def test_no_limit_is_exceeded() -> None:
    assert dict(pair for module in [*packages(), *scripts()] for pair in violations(module)) == {}


SIXTEEN = "class C:\n def f(self) -> None:\n" + "".join(f"  self.a{i} = 0\n" for i in range(16))
ELEVEN = "class C:\n def __init__(self, a: int, *, " + ", ".join(f"b{i}: int" for i in range(10))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("pass\n" * FILE_LINES, "file m"),
        ("pass\n" * (FILE_LINES - 1), None),
        ("async def f() -> None:\n" + "    pass\n" * 59, "function m.f"),
        ("def f() -> None:\n" + "    pass\n" * 58, None),
        ("def f(a) -> None: ...\n", "annotation m.f"),
        ("def f(*a: int, **b) -> None: ...\n", "annotation m.f"),
        ("def f(a: int): ...\n", "annotation m.f"),
        ("class C:\n @classmethod\n def f(cls, *, a: int) -> None: ...\n", None),
        (f"{ELEVEN}): ...", "constructor m.C"),
        (f"{ELEVEN}): ...".replace(", b0: int", ""), None),
        (SIXTEEN, "attributes m.C"),
        (SIXTEEN.replace("  self.a0 = 0\n", ""), None),
    ],
)
def test_violations_are_detected(text: str, key: str | None) -> None:
    assert [violated for violated, _ in violations(parse("m", text))] == ([key] if key else [])


def small_files_with_one_importer(modules: Sequence[Module]) -> list[str]:
    importers = defaultdict(set)
    for name, targets in import_graph(modules).items():
        for target in targets:
            importers[target].add(name)
    return [
        f"{module.name}: only {next(iter(importers[module.name]))}"
        for module in modules
        if module.lines < SMALL_FILE_LINES
        and len(importers[module.name]) == 1
        and not module.is_package
        and ".deepspeed" not in module.name
    ]


def folders_that_import_each_other(modules: Sequence[Module]) -> list[str]:
    folders = {module.name: module.folder for module in modules}
    graph = import_graph(modules)
    pairs = {
        (folders[name], folders[other]) for name, targets in graph.items() for other in targets
    }
    return sorted(
        f"{first} <-> {second}"
        for first, second in pairs
        if first < second and (second, first) in pairs and not second.startswith(f"{first}.")
    )


def import_cycles(modules: Sequence[Module]) -> list[str]:
    """Imports in functions and for type checkers included."""
    try:
        TopologicalSorter(import_graph(modules)).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def class_names_used_twice(modules: Sequence[Module]) -> list[str]:
    definitions = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            public = isinstance(node, ast.ClassDef) and not node.name.startswith("_")
            if public and ".deepspeed" not in module.name:
                definitions[node.name].append(module.name)
    return [f"{name}: {', '.join(names)}" for name, names in definitions.items() if len(names) > 1]


def functions_with_many_arguments(modules: Sequence[Module]) -> list[str]:
    return [
        f"{module.name}.{node.name}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, Function) and node.name != "__init__"
        if len(_arguments(node)) >= ARGUMENTS
    ]


def large_records(modules: Sequence[Module]) -> list[str]:
    return [
        f"{module.name}.{node.name}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
        and any("dataclass" in ast.dump(decorator) for decorator in node.decorator_list)
        and sum(isinstance(part, ast.AnnAssign) for part in node.body) >= RECORD_FIELDS
    ]


# {rule: (how many violations there may be, modules that violate it)}
RULES: dict[Callable[[Sequence[Module]], list[str]], tuple[int, dict[str, str]]] = {
    small_files_with_one_importer: (SMALL_FILES, {"p.a": "import p.b", "p.b": ""}),
    folders_that_import_each_other: (
        0,
        {"p.q.a": "import p.r.b", "p.r.b": "import p.q.c", "p.q.c": ""},
    ),
    import_cycles: (0, {"p.a": "import p.b", "p.b": "def f():\n from p import a"}),
    class_names_used_twice: (0, {"p.a": "class C: ...", "p.b": "class C: ..."}),
    functions_with_many_arguments: (4, {"p.a": "def f(a, b, c, d, e, f, g, h, i): ..."}),
    large_records: (2, {"p.a": "@dataclass\nclass C:\n" + " a: int\n" * 17}),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_structure(rule: Callable[[Sequence[Module]], list[str]]) -> None:
    limit, example = RULES[rule]
    wrong = rule(packages())
    assert len(wrong) <= limit, "\n".join(wrong)
    assert rule([parse(name, text) for name, text in example.items()])
