"""The arguments of `rayzero config`. Nothing heavy is imported before a command runs.

Each command imports what it does when it does it: that brings pydantic with it, and `--help` must
not wait for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    from rayzero.orchestrator.cli.explain import explain_file

    raise typer.Exit(explain_file(file, everything, as_json))


@config.command(epilog="Example: rayzero config schema > engine.schema.json")
def schema() -> None:
    """Print the JSON schema of engine configs, for editors."""
    from rayzero.orchestrator.cli.explain import print_schema

    raise typer.Exit(print_schema())
