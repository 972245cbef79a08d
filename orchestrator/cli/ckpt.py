"""The arguments of `rayzero ckpt`. Nothing heavy is imported before a command runs.

Each command imports what it does when it does it: that brings xxhash, pyarrow or torch with it, and
`--help` must not wait for them.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

ckpt = typer.Typer(
    help="List, verify, prune and export checkpoints.",
    epilog="Example: rayzero ckpt ls runs/gpt",
    no_args_is_help=True,
    add_completion=False,
)

Place: TypeAlias = Annotated[
    str,
    typer.Argument(
        help="A job's folder (checkpoint.path/name) or one checkpoint in it (step-<n>); a path or "
        "a URL.",
        metavar="PATH",
    ),
]
AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="JSON lines on stdout, one for each checkpoint.")
]
AsOneJson: TypeAlias = Annotated[bool, typer.Option("--json", help="One JSON value on stdout.")]


@ckpt.command("ls", epilog="Example: rayzero ckpt ls runs/gpt --json")
def list_(path: Place, as_json: AsJson = False) -> None:
    """List checkpoints: step, age, size, world size, stage, and whether they are whole.

    Only manifests and sizes are read; `verify` reads everything.
    """
    from rayzero.orchestrator.cli.checkpoints import list_all

    raise typer.Exit(list_all(path, as_json))


@ckpt.command(epilog="Example: rayzero ckpt verify runs/gpt/step-200")
def verify(path: Place, as_json: AsJson = False) -> None:
    """Read checkpoints whole, and name every file that is not as it was written.

    Exit code 0: all are as they were written. 1: one is damaged.
    """
    from rayzero.orchestrator.cli.checkpoints import verify_all

    raise typer.Exit(verify_all(path, as_json))


@ckpt.command(epilog="Example: rayzero ckpt prune runs/gpt --keep 3 --keep-every 1000 --dry-run")
def prune(
    path: Annotated[
        str, typer.Argument(help="A job's folder (checkpoint.path/name).", metavar="PATH")
    ],
    keep: Annotated[int, typer.Option(min=1, metavar="N", help="Keep the newest N whole ones.")],
    keep_every: Annotated[
        int | None,
        typer.Option(min=1, metavar="M", help="Keep, besides, every step that M divides."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: AsOneJson = False,
) -> None:
    """Remove older checkpoints, and what is left of saves that did not end.

    Exit code 0: removed. 1: something could not be removed. 2: no such folder.
    """
    from rayzero.orchestrator.cli.checkpoints import prune_job

    raise typer.Exit(prune_job(path, keep, keep_every, dry_run, as_json))


@ckpt.command(epilog="Example: rayzero ckpt export runs/gpt --to out --format safetensors")
def export(
    path: Place,
    to: Annotated[str, typer.Option(metavar="FOLDER", help="A new or empty local folder.")],
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="safetensors (as transformers reads it), torch (a state dict) or dcp "
            "(torch.distributed.checkpoint, with the optimizer).",
        ),
    ] = "safetensors",
    as_json: AsOneJson = False,
) -> None:
    """Write a checkpoint as files that others read. Of a job, the newest whole one.

    Exit code 0: written. 1: it is damaged, or could not be written. 2: no such checkpoint, or a
    folder that is not empty.
    """
    from rayzero.orchestrator.cli.checkpoints import export_one

    raise typer.Exit(export_one(path, to, kind, as_json))
