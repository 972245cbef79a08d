"""The `rayzero` command: its groups of commands, and `--version`."""

from __future__ import annotations

from typing import Annotated

import typer

from rayzero.orchestrator.cli import (
    chaos,
    ckpt,
    config,
    data,
    doctor,
    jobs,
    launch,
    observe,
    plan,
    run,
)
from rayzero.orchestrator.cli.command import new_group

app = new_group(
    "Train PyTorch models with ZeRO on Ray clusters whose nodes come and go.",
    "rayzero run examples/gpt/job.yaml",
)
for module in (run, launch, jobs, observe, chaos, plan, doctor):
    app.add_typer(module.commands)
app.add_typer(ckpt.commands, name="ckpt")
app.add_typer(config.commands, name="config")
app.add_typer(data.commands, name="data")


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version  # slow: imports the email package

        print(f"rayzero {version('rayzero')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options of `rayzero` itself."""
