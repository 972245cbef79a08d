"""What `rayzero config` does: each function is one command, and returns the exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import rich.console
from rich.table import Table
from rich.text import Text

from rayzero.engine.config.explain import Fact, facts, given
from rayzero.engine.config.keys.rows import IMPLEMENTED, NO_OP, REFUSED
from rayzero.engine.config.parse import Parsed, parse
from rayzero.engine.config.schema import schema
from rayzero.engine.errors import ConfigError
from rayzero.engine.masking import redacted
from rayzero.orchestrator.cli.codes import with_exit_code
from rayzero.orchestrator.loading import load_job

_STYLES = {IMPLEMENTED: "green", NO_OP: "yellow", REFUSED: "red"}
_PIPE_WIDTH = 240  # columns where there is no terminal: a key a line


@with_exit_code
def explain_file(file: Path, everything: bool, as_json: bool) -> int:
    found = [fact for fact in facts(_parsed(file)) if everything or given(fact)]
    shown = [replace(one, value=redacted(one.value, one.key.rpartition(".")[2])) for one in found]
    if as_json:
        for fact in shown:
            print(json.dumps(asdict(fact)))
    else:
        _print_table(shown)
    return 0


@with_exit_code
def print_schema() -> int:
    print(json.dumps(schema(), indent=2))
    return 0


def _parsed(file: Path) -> Parsed:
    if file.suffix.lower() not in (".yaml", ".yml"):
        return parse(file)
    engine = load_job(file).engine
    if not isinstance(engine, dict):
        raise ConfigError(
            f"job file {str(file)!r} has no engine config",
            allowed="`engine:` with the path of a config file, or with its contents",
        )
    return parse(engine)


def _print_table(shown: Sequence[Fact]) -> None:
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    terminal = rich.console.Console(width=width)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("key", "status", "value"):
        table.add_column(head, no_wrap=True)
    table.add_column("from")
    for group, members in groupby(shown, key=lambda fact: fact.group):
        table.add_row(Text(group, style="bold"))
        for fact in members:
            status = Text(str(fact.status), style=_STYLES[fact.status])
            table.add_row(Text(f"  {fact.key}"), status, Text(_value(fact)), Text(_from(fact)))
    terminal.print(table)


def _value(fact: Fact) -> str:
    text = "-" if fact.value is None else json.dumps(fact.value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _from(fact: Fact) -> str:
    return f"{fact.source} ({fact.reason})" if fact.reason else fact.source
