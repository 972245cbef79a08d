"""Hands a command on to a cluster that this machine is no part of."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer


def handed_on(
    address: str | None,
    *arguments: object,
    sets: Sequence[str] | None = None,
    as_json: bool = False,
    folder: Path | None = None,
) -> None:
    """Runs the command there and ends this process with its exit code, if `address` is that of a
    dashboard; else does nothing.

    Args:
        folder: goes along; arguments that are paths in it are given as they are found from it.
    """
    if address is None or not address.startswith(("http://", "https://")):
        return
    # Here, because it brings ray with it, and `--help` must not wait for it.
    from rayzero.orchestrator.cli.codes import with_exit_code
    from rayzero.orchestrator.remote import OtherCluster

    words = [one.name if isinstance(one, Path) else str(one) for one in arguments]
    words += [word for one in sets or () for word in ("--set", one)]
    words += ["--json"] * as_json

    @with_exit_code
    def run() -> int:
        cluster = OtherCluster(address)
        job = cluster.begin(words, None if folder is None else folder.resolve())
        return cluster.follow(job, sys.stdout.write)

    raise typer.Exit(run())
