"""Rules for names, file sizes, module structure and language of the packages."""

from __future__ import annotations

import ast
import io
import re
import statistics
import tokenize
from collections import defaultdict
from collections.abc import Callable, Sequence
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.house.source import Function, Module, import_graph, packages, parse

# The maximum number of violations of each rule.
LIMITS = {
    "small files with one importer": 6,
    "folders that import each other": 0,
    "import cycles, type-only imports included": 0,
    "class names used twice": 0,
    "module names used three times": 3,
    "retired module names": 0,
    "phrases": 0,
    "fixes without a verb, a setting or a command": 0,
    "functions with over 8 arguments": 4,
    "classes over 40 public names, bases included": 0,
    "records over 16 fields": 2,
}
SMALL_FILE_LINES = 60
MIN_MEDIAN_FILE_LINES = 140
"""Raised by a new capability only: 38,000 before fault handling and speed on GPUs, 42,000 before
Hugging Face's libraries and launched scripts, 51,500 before the fork server, the command server,
the page of all jobs and trackers, 52,700 before the rest of DeepSpeed's modules, 53,600 before
what was found by use of all of it."""

# Module names that are not descriptive.
_RETIRED = """
    admission answers asking behind bell blame bounds carrying chronicle codes columns coming
    crew desk doors elsewhere ending feed found halves hearing judge keeper keeping lasting
    leaving lines lost mail manners masking neighbours nothing outcome own owners papers passage
    past pending pins places put randomness reach readings rest resting ring roster seating
    seats shelf sift small speeds stopping table tally texts together travelling trees trial
    troubles turns vigil volume vote warmth watch ways whole wholes wire wishes
"""
RETIRED = frozenset(_RETIRED.split())
PHRASES = re.compile(
    r"\b(told|tells of|at hand|under way|by wish|of our own|of ours|lets? go of|gone on|"
    r"goes on with|stands? at|whoever|to whom|those who|nobody who|borne with|by chance|is had|"
    r"can be had|cannot be had|in words|in its words|sets? out|be gone|is there$|breath|"
    r"whom it concerns)\b",
    re.IGNORECASE,
)


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


def module_names_used_three_times(modules: Sequence[Module]) -> list[str]:
    modules_by_name = defaultdict(list)
    for module in modules:
        if not module.is_package:
            modules_by_name[module.name.rpartition(".")[2]].append(module.name)
    return [f"{name}: {', '.join(full)}" for name, full in modules_by_name.items() if len(full) > 2]


def retired_module_names(modules: Sequence[Module]) -> list[str]:
    return [m.name for m in modules if m.name.rpartition(".")[2] in RETIRED and not m.is_package]


def phrases(modules: Sequence[Module]) -> list[str]:
    """Phrases that are not technical English, in comments and strings."""
    violations = []
    for module in modules:
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                matches = PHRASES.findall(token.string)
                violations += [f"{module.name}:{token.start[0]} {match}" for match in matches]
    return violations


NOUN = re.compile(r"(a|an|the|another|that|one|no|nothing|other) ")


def fixes_without_verb(modules: Sequence[Module]) -> list[str]:
    """What an error says to do about it begins with a noun."""
    return [
        f"{module.name}: {value.value}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.keyword) and node.arg == "fix"
        for value in list(ast.walk(node.value))[:2]
        if isinstance(value, ast.Constant) and NOUN.match(str(value.value))
    ]


def functions_with_over_8_arguments(modules: Sequence[Module]) -> list[str]:
    violations = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, Function):
                spec = node.args
                names = [arg.arg for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
                if len([name for name in names if name not in ("self", "cls")]) > 8:
                    violations.append(f"{module.name}.{node.name}")
    return violations


def classes_over_40_public_names(modules: Sequence[Module]) -> list[str]:
    classes = {
        node.name: node
        for module in modules
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
    }

    def public_names(node: ast.ClassDef, visited: frozenset[str]) -> set[str]:
        names = {part.name for part in node.body if isinstance(part, Function)}
        for part in ast.walk(node):
            if isinstance(part, ast.Assign) and part in node.body:
                names |= {target.id for target in part.targets if isinstance(target, ast.Name)}
            stored = isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
            if stored and isinstance(part.value, ast.Name) and part.value.id == "self":
                names.add(part.attr)
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in classes and base.id not in visited:
                names |= public_names(classes[base.id], visited | {base.id})
        return {name for name in names if not name.startswith("_")}

    return [
        name for name, node in classes.items() if len(public_names(node, frozenset({name}))) > 40
    ]


def records_over_16_fields(modules: Sequence[Module]) -> list[str]:
    return [
        f"{module.name}.{node.name}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
        and any("dataclass" in ast.dump(decorator) for decorator in node.decorator_list)
        and sum(isinstance(part, ast.AnnAssign) for part in node.body) > 16
    ]


RULES: dict[str, Callable[[Sequence[Module]], list[str]]] = {
    "small files with one importer": small_files_with_one_importer,
    "folders that import each other": folders_that_import_each_other,
    "import cycles, type-only imports included": import_cycles,
    "class names used twice": class_names_used_twice,
    "module names used three times": module_names_used_three_times,
    "retired module names": retired_module_names,
    "phrases": phrases,
    "fixes without a verb, a setting or a command": fixes_without_verb,
    "functions with over 8 arguments": functions_with_over_8_arguments,
    "classes over 40 public names, bases included": classes_over_40_public_names,
    "records over 16 fields": records_over_16_fields,
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str) -> None:
    violations = RULES[rule](packages())
    assert len(violations) <= LIMITS[rule], "\n".join(violations)


def test_median_file_size() -> None:
    lines = [module.lines for module in packages() if not module.is_package]
    assert statistics.median(lines) >= MIN_MEDIAN_FILE_LINES


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        ("small files with one importer", {"p.a": "import p.b", "p.b": ""}),
        (
            "folders that import each other",
            {"p.q.a": "import p.r.b", "p.r.b": "import p.q.c", "p.q.c": ""},
        ),
        (
            "import cycles, type-only imports included",
            {"p.a": "import p.b", "p.b": "def f():\n from p import a"},
        ),
        ("class names used twice", {"p.a": "class C: ...", "p.b": "class C: ..."}),
        ("module names used three times", {"p.m": "", "q.m": "", "r.m": ""}),
        ("retired module names", {"p.desk": ""}),
        ("phrases", {"p.a": "# what it was told"}),
        ("fixes without a verb, a setting or a command", {"p.a": "f(fix='the name')"}),
        ("functions with over 8 arguments", {"p.a": "def f(a, b, c, d, e, f, g, h, i): ..."}),
        (
            "classes over 40 public names, bases included",
            {
                "p.a": "class A:\n" + "".join(f" def a{i}(self): ...\n" for i in range(20)),
                "p.b": "class B(A):\n" + "".join(f" def b{i}(self): ...\n" for i in range(21)),
            },
        ),
        ("records over 16 fields", {"p.a": "@dataclass\nclass C:\n" + " a: int\n" * 17}),
    ],
)
def test_rule_detects_violation(rule: str, sources: dict[str, str]) -> None:
    modules = [parse(name, text) for name, text in sources.items()]
    violated = {name for name, check in RULES.items() if check(modules)}
    assert rule in violated
