"""What the pages tell the reader to type can be typed, and links into a page find their heading."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from rayzero.orchestrator.cli.app import app
from tests.house.source import ROOT
from tests.house.test_docs import PAGES

WITH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
OURS = re.compile(r"(?:^|\s)(?:\S*python3? -m )?rayzero (?=[a-z-])")
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
SHELLS = ("", "console", "bash", "sh")
USAGE_ERROR: Any = typer.BadParameter.__base__
TREE: Any = get_command(app)


def mistake(line: str) -> str | None:
    """What is wrong with a whole command line, such as `rayzero ls --json`."""
    command, words = TREE, _words(line)
    names = ["rayzero"]
    while commands := getattr(command, "commands", None):
        name = words.pop(0) if words else ""
        if name not in commands:
            return None if name == "--help" else f"no command {' '.join(names)} {name}"
        names.append(name)
        command = commands[name]
    try:
        command.make_context(" ".join(names), words)
    except typer.Exit:
        pass  # --help
    except USAGE_ERROR as error:
        return str(error.format_message())
    return None


def unknown(phrase: str) -> str | None:
    """What is not known of a command that is spoken of, such as `rayzero ls`: names and options."""
    words = phrase.split()[1:]
    known = _names()
    path = words[:2] if f"{words[0]} {words[1] if words[1:] else ''}" in known else words[:1]
    if any(f"{one}" not in known for one in path[0].split("|")):
        return f"no command {path[0]}"
    options = known[" ".join(path)] if "|" not in path[0] else None
    flags = (word.strip("[],.") for word in words[len(path) :])
    asked = [flag for flag in flags if flag.startswith("-") and len(flag) > 1]
    wrong = [flag for flag in asked if options is not None and flag not in options]
    return f"{' '.join(path)} has no {', '.join(wrong)}" if wrong else None


@cache
def _names() -> dict[str, list[str]]:
    """The options of every command by its whole name."""
    found: dict[str, list[str]] = {}
    for name, command in TREE.commands.items():
        below = {f"{name} {key}": one for key, one in getattr(command, "commands", {}).items()}
        for full, one in {name: command, **below}.items():
            found[full] = ["--help", *(flag for param in one.params for flag in param.opts)]
    return found


def _words(line: str) -> list[str]:
    """Its arguments, without comments and what comes behind a pipe or the like."""
    words = shlex.split(line, comments=True)[1:]
    ends = [at for at, word in enumerate(words) if word in ("|", ">", ">>", "&", "&&", ";", "2>&1")]
    return words[: min(ends, default=len(words))]


def commands(page: str) -> Iterator[str]:
    """The command lines of a page's code blocks, from `rayzero` on."""
    for kind, block in FENCED.findall(page):
        for line in block.replace("\\\n", " ").splitlines() if kind in SHELLS else ():
            if (found := OURS.search(line)) and not line.lstrip().startswith("#"):
                yield "rayzero " + line[found.end() :]


def phrases(page: str) -> Iterator[str]:
    """Commands that are spoken of in the text."""
    for code in re.findall(r"`(rayzero [a-z][^`]*)`", FENCED.sub("", page)):
        yield " ".join(code.split())


def anchors(page: str) -> set[str]:
    """The names that a page's headings have as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@WITH_PAGE
def test_every_command_of_a_block_is_one(page: Path) -> None:
    told = {line: mistake(line) for line in commands(page.read_text(encoding="utf-8"))}
    assert {line: wrong for line, wrong in told.items() if wrong} == {}


@WITH_PAGE
def test_every_command_that_is_spoken_of_is_one(page: Path) -> None:
    told = {line: unknown(line) for line in phrases(page.read_text(encoding="utf-8"))}
    assert {line: wrong for line, wrong in told.items() if wrong} == {}


@WITH_PAGE
def test_every_link_to_a_heading_finds_it(page: Path) -> None:
    lost = []
    for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            other = page.parent / target if target else page
            if anchor not in anchors(other.read_text(encoding="utf-8")):
                lost.append(f"{target}#{anchor}")
    assert lost == []


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = {page.name for page in PAGES if page.parent == ROOT / "docs"} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("rayzero ls --jsno", "--jsno"),
        ("rayzero lss", "no command"),
        ("rayzero ckpt lst runs", "no command rayzero ckpt lst"),
        ("rayzero scale gpt", "MIN:MAX"),
        ("rayzero ckpt prune runs --keep x  # comment", "keep"),
        ("rayzero logs -f gpt | grep loss", None),
        ("rayzero status --help", None),
    ],
)
def test_a_wrong_command_is_seen(line: str, wrong: str | None) -> None:
    found = mistake(line)
    assert found is None if wrong is None else wrong in str(found)


@pytest.mark.parametrize("phrase", ["rayzero lss", "rayzero ckpt ls --to X", "rayzero ls|rn"])
def test_a_wrong_phrase_is_seen(phrase: str) -> None:
    assert unknown(phrase)


def test_commands_are_found_where_pages_have_them() -> None:
    block = "```\nray job submit -- rayzero run job.yaml\nmetrics: rayzero_x 1\n```\n"
    page = f"```py\nx\n```\n{block}See `rayzero ls`."
    assert list(commands(page)) == ["rayzero run job.yaml"]
    assert list(phrases(page)) == ["rayzero ls"]
    assert anchors("# A `b`, and c-d\n") == {"a-b-and-c-d"}
