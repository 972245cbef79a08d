"""The source files with syntax trees and imports, and the pages of the documentation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engine", "workers", "orchestrator")
ADAPTERS = ("/data", "/deepspeed", "/huggingface", "/vllm")
FOLDERS = ("*.md", "docs/*.md", "examples/**/*.md", "helm/**/*.md", "manifests/*.md")
PAGES = [page for pattern in FOLDERS for page in sorted(ROOT.glob(pattern))]
COMMAND = re.compile(r"(?:^|\s)(?:\S*python3? -m )?rayzero (?=[a-z-])")
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
SHELLS = ("", "console", "bash", "sh")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A source file: dotted name, text and syntax tree."""

    name: str
    text: str
    tree: ast.Module
    is_package: bool = False

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def folder(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]


def parse(name: str, text: str, *, is_package: bool = False) -> Module:
    return Module(name, text, ast.parse(text), is_package)


@cache
def packages() -> list[Module]:
    """The modules of the import package `rayzero`, under their import names."""
    # The other folders of rayzero/ are symbolic links to PACKAGES.
    folders = [ROOT / f"rayzero{name}" for name in ("", *ADAPTERS)]
    paths = [("rayzero", path) for folder in folders for path in sorted(folder.glob("*.py"))]
    return [*_read(ROOT / "rayzero", paths), *(m for p in PACKAGES for m in _folder(p, "rayzero."))]


@cache
def scripts() -> list[Module]:
    """The examples and benchmarks, which users copy from."""
    return [m for folder in ("examples", "benchmarks") for m in _folder(folder, "")]


@cache
def suite() -> list[Module]:
    return _folder("tests", "")


def _folder(folder: str, prefix: str) -> list[Module]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return _read(ROOT / folder, [(prefix + folder, path) for path in paths])


def _read(base: Path, prefixed_paths: list[tuple[str, Path]]) -> list[Module]:
    modules = []
    for prefix, path in prefixed_paths:
        parts = [prefix, *path.relative_to(base).with_suffix("").parts]
        name = ".".join(parts).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        modules.append(parse(name, text, is_package=path.name == "__init__.py"))
    return modules


def imported_names(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, also inside functions."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def used_names(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every imported name and its attributes.

    Names are absolute: `dist.send` is `torch.distributed.send` after `import torch.distributed as
    dist`.
    """
    yield from imported_names(module)
    origins = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                origins[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                origins[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            chain, base = [node.attr], node.value
            while isinstance(base, ast.Attribute):
                chain, base = [base.attr, *chain], base.value
            if isinstance(base, ast.Name) and base.id in origins:
                yield node.lineno, ".".join([origins[base.id], *chain])


Graph = dict[str, set[str]]


def import_graph(modules: Sequence[Module]) -> Graph:
    """The modules that each module imports, also inside functions and for type checkers."""
    names = {module.name for module in modules}
    graph: Graph = {}
    for module in modules:
        targets = set()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                submodules = {f"{node.module}.{alias.name}" for alias in node.names} & names
                targets |= submodules or {node.module or ""}
        graph[module.name] = (targets & names) - {module.name}
    return graph


def commands(page: str) -> Iterator[str]:
    """The rayzero command lines in a page's code blocks."""
    for kind, block in FENCED.findall(page):
        for line in block.replace("\\\n", " ").splitlines() if kind in SHELLS else ():
            if (match := COMMAND.search(line)) and not line.lstrip().startswith("#"):
                yield "rayzero " + line[match.end() :]
