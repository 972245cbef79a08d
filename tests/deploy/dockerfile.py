"""A Dockerfile, read: its stages, instructions and what it copies. Only what ours uses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """One instruction.

    Args:
        stage: the name of the stage it is in; empty before the first.
        word: such as RUN.
        rest: what follows, with continued lines joined.
    """

    stage: str
    word: str
    rest: str


def steps(path: Path) -> list[Step]:
    text = re.sub(r"(?m)^\s*#.*\n", "", path.read_text(encoding="utf-8"))
    found, stage = [], ""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            if word == "FROM":
                stage = rest.partition(" AS ")[2]
            found.append(Step(stage, word, rest.strip()))
    return found


def arguments(found: list[Step]) -> dict[str, str]:
    """The build arguments that have a default."""
    lines = [step.rest for step in found if step.word == "ARG" and "=" in step.rest]
    return dict(line.split("=", 1) for line in lines)


def copied(found: list[Step]) -> list[str]:
    """What is taken from the context."""
    words = [step.rest.split() for step in found if step.word == "COPY"]
    return [one for parts in words if not parts[0].startswith("--") for one in parts[:-1]]


def context(root: Path) -> Iterator[Path]:
    """The files that .dockerignore lets into the context; the last line that matches decides."""
    lines = (root / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    for top in sorted(root.iterdir()):
        if _kept(top.name, rules):
            for path in [top] if top.is_file() else sorted(top.rglob("*")):
                if path.is_file() and _kept(path.relative_to(root).as_posix(), rules):
                    yield path


def _kept(name: str, rules: list[str]) -> bool:
    kept = True
    parts = name.split("/")
    for rule in rules:
        pattern = rule.removeprefix("!")
        if pattern.startswith("**/"):
            matched = any(fnmatch(part, pattern[3:]) for part in parts)
        else:
            matched = fnmatch(parts[0], pattern)
        if matched:
            kept = rule.startswith("!")
    return kept
