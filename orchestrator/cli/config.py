"""`rayzero config`: explain an engine config, print its JSON schema."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.cli.command import JsonLinesFlag, local_command, new_group

if TYPE_CHECKING:
    from rayzero.engine.config.explain import KeyInfo
    from rayzero.engine.config.parse import ParsedConfig

commands = new_group(
    "Check and explain engine configs (DeepSpeed's format and rayzero's own keys).",
    "rayzero config explain ds_config.json",
)

_MAX_VALUE_CHARACTERS = 40
_MIN_COLUMNS = 40


@commands.command("explain", epilog="Example: rayzero config explain ds_config.json --all")
@local_command
def explain_config(
    file: Annotated[
        Path,
        typer.Argument(
            help="Engine config (JSON or Hjson), or a job file (YAML) with one.", metavar="FILE"
        ),
    ],
    all_keys: Annotated[
        bool, typer.Option("--all", help="Show every known key, not only those in effect.")
    ] = False,
    as_json: JsonLinesFlag = False,
) -> None:
    """Print every key in effect: its value, the source of the value, and what it does.

    Exit code 0: the config is valid. 2: it is not valid; every mistake is listed.
    """
    from rayzero.engine.config.explain import is_set_or_active, key_infos
    from rayzero.engine.redact import redact_document

    infos = [
        replace(info, value=redact_document(info.value, info.key.rpartition(".")[2]))
        for info in key_infos(_parse_file(file))
        if all_keys or is_set_or_active(info)
    ]
    if as_json:
        for info in infos:
            print(json.dumps(asdict(info)))
    else:
        _print_keys(infos)


@commands.command("schema", epilog="Example: rayzero config schema > engine.schema.json")
@local_command
def print_schema() -> None:
    """Print the JSON schema of engine configs, for editors."""
    from rayzero.engine.config.explain import json_schema

    print(json.dumps(json_schema(), indent=2))


def _parse_file(file: Path) -> ParsedConfig:
    from rayzero.engine.config.parse import parse_with_provenance
    from rayzero.orchestrator.job_file import load_job

    if file.suffix.lower() not in (".yaml", ".yml"):
        return parse_with_provenance(file)
    engine = load_job(file).engine
    if not isinstance(engine, dict):
        raise ConfigError(
            f"job file {str(file)!r} has no engine config",
            allowed="`engine:` with the path of an engine config, or with its contents",
        )
    return parse_with_provenance(engine)


def _print_keys(infos: Sequence[KeyInfo]) -> None:
    """Prints lines `  key = value  (source): what it does` below the name of their group. If stdout
    is not a terminal, lines are not wrapped."""
    for group, members in groupby(infos, key=lambda info: info.group):
        print(group)
        for info in members:
            value = "-" if info.value is None else json.dumps(info.value)
            if len(value) > _MAX_VALUE_CHARACTERS:
                value = f"{value[: _MAX_VALUE_CHARACTERS - 3]}..."
            what = f"{info.status}: {info.reason}" if info.reason else info.what
            text = f"  {info.key} = {value}  ({info.source}): {what}"
            if sys.stdout.isatty():
                width = max(get_terminal_size().columns, _MIN_COLUMNS)
                text = fill(text, width, subsequent_indent=" " * 6)
            print(text)
