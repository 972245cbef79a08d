"""Commands, names, files and links in the documentation exist; the help of each command."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from rayzero.orchestrator.cli.app import app
from tests.house.source import FENCED, PAGES, ROOT, commands
from tests.vllm import stand_in

USAGE_ERROR: Any = typer.BadParameter.__base__
ROOT_COMMAND: Any = get_command(app)


def command_error(line: str) -> str | None:
    """The usage error of a complete command line such as `rayzero ls --json`."""
    command, words = ROOT_COMMAND, _arguments(line)
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


def mention_error(mention: str) -> str | None:
    """An unknown command or option in a mention of a command such as `rayzero ls`."""
    words = mention.split()[1:]
    options_by_command = _options_by_command()
    full_name = f"{words[0]} {words[1] if words[1:] else ''}"
    path = words[:2] if full_name in options_by_command else words[:1]
    if any(name not in options_by_command for name in path[0].split("|")):
        return f"no command {path[0]}"
    options = options_by_command[" ".join(path)] if "|" not in path[0] else None
    arguments = (word.strip("[],.") for word in words[len(path) :])
    flags = [word for word in arguments if word.startswith("-") and len(word) > 1]
    unknown = [flag for flag in flags if options is not None and flag not in options]
    return f"{' '.join(path)} has no {', '.join(unknown)}" if unknown else None


@cache
def _options_by_command() -> dict[str, list[str]]:
    """The options of every command by its full name."""
    options: dict[str, list[str]] = {}
    for name, command in ROOT_COMMAND.commands.items():
        commands = {name: command}
        for key, subcommand in getattr(command, "commands", {}).items():
            commands[f"{name} {key}"] = subcommand
        for full_name, item in commands.items():
            options[full_name] = ["--help", *(flag for param in item.params for flag in param.opts)]
    return options


def _arguments(line: str) -> list[str]:
    """Arguments of a command line up to a comment, pipe or redirection."""
    words = shlex.split(line, comments=True)[1:]
    separators = ("|", ">", ">>", "&", "&&", ";", "2>&1")
    ends = [index for index, word in enumerate(words) if word in separators]
    return words[: min(ends, default=len(words))]


def mentions(page: str) -> Iterator[str]:
    """Commands mentioned in the text, outside code blocks."""
    for code in re.findall(r"`(rayzero [a-z][^`]*)`", FENCED.sub("", page)):
        yield " ".join(code.split())


def _can_be_imported(module: str, name: str) -> bool:
    needs_vllm = module.startswith("rayzero.vllm")
    with stand_in.installed() if needs_vllm else nullcontext():
        home = import_module(module)
    is_package = hasattr(home, "__path__")
    return hasattr(home, name) or (is_package and find_spec(f"{module}.{name}") is not None)


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def python_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    return [f"/rayzero/{file}" for file in listed.stdout.splitlines()]


READERS_FILES = ("first.py", "train.py")
"""Files that pages have the reader write."""


def mistakes(page: Path) -> Iterator[object]:
    """Commands, names, links and files of a page that do not exist."""
    text = page.read_text(encoding="utf-8")
    yield from filter(None, map(command_error, commands(text)))
    yield from filter(None, map(mention_error, mentions(text)))
    for language, block in FENCED.findall(text):
        for node in ast.walk(ast.parse(textwrap.dedent(block))) if language == "python" else ():
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.split(".")[0] == "rayzero":
                names = [name.name for name in node.names]
                yield from (name for name in names if not _can_be_imported(module, name))
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        other = page.parent / target if target else page
        if "://" not in target and not other.exists():
            yield target
        elif anchor and "://" not in target and anchor not in anchors(other.read_text()):
            yield f"{target}#{anchor}"
    for name in re.findall(r"`([\w./-]+\.py)`", text):
        if name not in READERS_FILES and not any(it.endswith(f"/{name}") for it in python_files()):
            yield name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    assert list(mistakes(page)) == []


def test_mistakes_are_found(tmp_path: Path) -> None:
    wrong = "`rayzero lss` [a](b.md) [c](#d) `none.py`\n```python\nfrom rayzero import no\n```\n"
    (tmp_path / "page.md").write_text(f"# A\n[e](#a)\n{wrong}```bash\nrayzero ls --jsno\n```\n")
    assert len(list(mistakes(tmp_path / "page.md"))) == 6


def test_index_lists_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = {page.name for page in PAGES if page.parent == ROOT / "docs"} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()


@pytest.mark.parametrize(
    ("line", "error"),
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
def test_command_error(line: str, error: str | None) -> None:
    message = command_error(line)
    assert message is None if error is None else error in str(message)


@pytest.mark.parametrize("mention", ["rayzero lss", "rayzero ckpt ls --to X", "rayzero ls|rn"])
def test_mention_error(mention: str) -> None:
    assert mention_error(mention)


def test_commands_mentions_and_anchors_of_page() -> None:
    block = "```\nray job submit -- rayzero run job.yaml\nmetrics: rayzero_x 1\n```\n"
    page = f"```py\nx\n```\n{block}See `rayzero ls`."
    assert list(commands(page)) == ["rayzero run job.yaml"]
    assert list(mentions(page)) == ["rayzero ls"]
    assert anchors("# A `b`, and c-d\n") == {"a-b-and-c-d"}


@pytest.mark.parametrize("name", _options_by_command())
def test_help_fits_80_columns_and_has_an_example(name: str) -> None:
    """Of a group of commands, without an example."""
    command = ROOT_COMMAND.commands[name.split()[0]]
    is_group = hasattr(command, "commands") and " " not in name
    result = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "80"})
    text = result.output
    assert result.exit_code == 0
    assert "…" not in text, "a cell that is cut off"
    example = re.search(r"Example: (rayzero .*(?:\n .*\S)*)", text)
    assert example is not None or is_group
    for line in re.split(", (?=rayzero)", " ".join(example[1].split())) if example else ():
        assert command_error(line) is None
