"""Config explain, schema.

The arguments of `rayzero config`. Nothing heavy is imported before a command runs.

Each command imports what it does when it does it: that brings pydantic with it, and `--help` must
not wait for it.

What `rayzero config` does: each function is one command, and returns the exit code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated

import rich.console
import typer
from rich.table import Table
from rich.text import Text

from rayzero.engine.config.explain import KeyInfo, is_set_or_active, json_schema, key_infos
from rayzero.engine.config.keys.spec import IMPLEMENTED, NO_OP, REFUSED
from rayzero.engine.config.parse import ParsedConfig, parse_with_provenance
from rayzero.engine.errors import ConfigError
from rayzero.engine.redact import redact_document
from rayzero.orchestrator.cli.remote import with_exit_code
from rayzero.orchestrator.job_file import load_job

config = typer.Typer(
    help="Check and explain engine configs: DeepSpeed's, and our keys.",
    epilog="Example: rayzero config explain ds_config.json",
    no_args_is_help=True,
    add_completion=False,
)


@config.command(epilog="Example: rayzero config explain ds_config.json --all")
def explain(
    file: Annotated[
        Path,
        typer.Argument(
            help="An engine config (JSON or Hjson), or a job file (YAML) with one.", metavar="FILE"
        ),
    ],
    everything: Annotated[
        bool, typer.Option("--all", help="Every known key, not only those in force.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON lines on stdout, one for each key.")
    ] = False,
) -> None:
    """Print every key that is in force: its status, its value, and where the value came from.

    Exit code 0: the config is right. 2: it is not; every mistake is named.
    """

    raise typer.Exit(explain_file(file, everything, as_json))


@config.command(epilog="Example: rayzero config schema > engine.schema.json")
def schema() -> None:
    """Print the JSON schema of engine configs, for editors."""

    raise typer.Exit(print_schema())


_STATUS_STYLES = {IMPLEMENTED: "green", NO_OP: "yellow", REFUSED: "red"}


_PIPE_WIDTH = 240  # columns where there is no terminal: a key a line


@with_exit_code
def explain_file(file: Path, everything: bool, as_json: bool) -> int:
    found = [fact for fact in key_infos(_parse_file(file)) if everything or is_set_or_active(fact)]
    shown = [
        replace(one, value=redact_document(one.value, one.key.rpartition(".")[2])) for one in found
    ]
    if as_json:
        for fact in shown:
            print(json.dumps(asdict(fact)))
    else:
        _print_table(shown)
    return 0


@with_exit_code
def print_schema() -> int:
    print(json.dumps(json_schema(), indent=2))
    return 0


def _parse_file(file: Path) -> ParsedConfig:
    if file.suffix.lower() not in (".yaml", ".yml"):
        return parse_with_provenance(file)
    engine = load_job(file).engine
    if not isinstance(engine, dict):
        raise ConfigError(
            f"job file {str(file)!r} has no engine config",
            allowed="`engine:` with the path of a config file, or with its contents",
        )
    return parse_with_provenance(engine)


def _print_table(shown: Sequence[KeyInfo]) -> None:
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    terminal = rich.console.Console(width=width)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("key", "status", "value"):
        table.add_column(head, no_wrap=True)
    table.add_column("from")
    for group, members in groupby(shown, key=lambda fact: fact.group):
        table.add_row(Text(group, style="bold"))
        for fact in members:
            status = Text(str(fact.status), style=_STATUS_STYLES[fact.status])
            table.add_row(
                Text(f"  {fact.key}"), status, Text(_value_text(fact)), Text(_source_text(fact))
            )
    terminal.print(table)


def _value_text(fact: KeyInfo) -> str:
    text = "-" if fact.value is None else json.dumps(fact.value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _source_text(fact: KeyInfo) -> str:
    return f"{fact.source} ({fact.reason})" if fact.reason else fact.source
