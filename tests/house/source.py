"""The project's own source, parsed, for the tests of the code rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engine", "workers", "orchestrator")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name, its text and its tree."""

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
    """The modules of the import package `rayzero`, under the names that they are imported by."""
    own = [ROOT / "rayzero", *(ROOT / "rayzero/deepspeed").rglob("")]  # the other folders are links
    door = [("rayzero", path) for folder in own for path in sorted(folder.glob("*.py"))]
    return [*_read(ROOT / "rayzero", door), *(m for p in PACKAGES for m in _folder(p, "rayzero."))]


@cache
def scripts() -> list[Module]:
    """The examples and benchmarks, which users read as models of how to write their own."""
    return [m for folder in ("examples", "benchmarks") for m in _folder(folder, "")]


@cache
def suite() -> list[Module]:
    return _folder("tests", "")


def _folder(folder: str, prefix: str) -> list[Module]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return _read(ROOT / folder, [(prefix + folder, path) for path in paths])


def _read(base: Path, named: list[tuple[str, Path]]) -> list[Module]:
    found = []
    for prefix, path in named:
        parts = [prefix, *path.relative_to(base).with_suffix("").parts]
        name = ".".join(parts).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        found.append(parse(name, text, is_package=path.name == "__init__.py"))
    return found


def imported(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import statement, wherever it stands."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def used(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything reached through an import: `dist.send` is found as
    `torch.distributed.send`, however torch.distributed was imported."""
    yield from imported(module)
    homes = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                homes[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                homes[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            chain, base = [node.attr], node.value
            while isinstance(base, ast.Attribute):
                chain, base = [base.attr, *chain], base.value
            if isinstance(base, ast.Name) and base.id in homes:
                yield node.lineno, ".".join([homes[base.id], *chain])
