"""Parser of the subset of Dockerfile and .dockerignore syntax that this project uses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """A Dockerfile instruction.

    Args:
        stage: name of its build stage; empty before the first.
        keyword: such as RUN.
        arguments: text after the keyword, with continued lines joined.
    """

    stage: str
    keyword: str
    arguments: str


def parse_dockerfile(path: Path) -> list[Instruction]:
    text = re.sub(r"(?m)^\s*#.*\n", "", path.read_text(encoding="utf-8"))
    instructions, stage = [], ""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.strip():
            keyword, _, arguments = line.strip().partition(" ")
            if keyword == "FROM":
                stage = arguments.partition(" AS ")[2]
            instructions.append(Instruction(stage, keyword, arguments.strip()))
    return instructions


def build_args(instructions: list[Instruction]) -> dict[str, str]:
    """Default values of the build arguments that have one, which may refer to earlier ones."""
    out: dict[str, str] = {}
    for line in instructions:
        if line.keyword == "ARG" and "=" in line.arguments:
            name, _, value = line.arguments.partition("=")
            out[name] = re.sub(r"\$\{(\w+)\}", lambda match: out[match[1]], value)
    return out


def copied_paths(instructions: list[Instruction]) -> list[str]:
    """Paths that are copied from the build context, not from another stage."""
    copies = [line.arguments.split() for line in instructions if line.keyword == "COPY"]
    return [path for words in copies if not words[0].startswith("--") for path in words[:-1]]


def context_files(root: Path) -> Iterator[Path]:
    """Files of the build context; the last matching line of .dockerignore decides."""
    lines = (root / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    for top in sorted(root.iterdir()):
        if _is_included(top.name, rules):
            for path in [top] if top.is_file() else sorted(top.rglob("*")):
                if path.is_file() and _is_included(path.relative_to(root).as_posix(), rules):
                    yield path


def _is_included(name: str, rules: list[str]) -> bool:
    included = True
    parts = name.split("/")
    for rule in rules:
        pattern = rule.removeprefix("!")
        if pattern.startswith("**/"):
            matched = any(fnmatch(part, pattern[3:]) for part in parts)
        else:
            matched = fnmatch(parts[0], pattern)
        if matched:
            included = rule.startswith("!")
    return included
