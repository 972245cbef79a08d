"""The commands and their arguments. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from rayzero.orchestrator.cli.ckpt import ckpt
from rayzero.orchestrator.cli.config import config
from rayzero.orchestrator.cli.job_options import ClusterAddress, add_job_commands
from rayzero.orchestrator.cli.remote import run_remotely

app = typer.Typer(
    help="Train PyTorch models with ZeRO on Ray clusters that keep changing.",
    epilog="Example: rayzero run examples/gpt/job.yaml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(ckpt, name="ckpt")
app.add_typer(config, name="config")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"rayzero {version('rayzero')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Train PyTorch models with ZeRO on Ray clusters that keep changing."""


@app.command(epilog="Example: rayzero run examples/gpt/job.yaml --set steps=50 --json")
def run(
    job: Annotated[Path, typer.Argument(help="The job file (YAML).", metavar="JOB.yaml")],
    address: Annotated[
        str | None,
        typer.Option(
            help="host:port of a Ray cluster, or http://HOST:8265 of its dashboard from outside. "
            "Default: RAY_ADDRESS, or else a cluster of our own."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Overrides a key of the job file: steps=10, engine.zero_optimization.stage=3.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON lines on stdout: events, then the summary.")
    ] = False,
) -> None:
    """Run a job and wait for its end.

    Exit code 0: it succeeded. 1: it failed. 2: a mistake in the job, its engine config or its
    entry point. 130: stopped by Ctrl-C; a second Ctrl-C kills.
    """
    run_remotely(address, "run", job, sets=overrides, as_json=as_json, folder=job.parent)
    # Here, because it brings ray and pydantic with it, and `--help` must not wait for them.
    from rayzero.orchestrator.cli.run import run_job

    raise typer.Exit(run_job(job, overrides or (), address, as_json))


add_job_commands(app)


@app.command(epilog="Example: rayzero scale gpt 2:8")
def scale(
    name: Annotated[str, typer.Argument(help="The job's name.", metavar="NAME")],
    workers: Annotated[
        str,
        typer.Argument(help="The least and the most workers, or one number.", metavar="MIN:MAX"),
    ],
    address: ClusterAddress = None,
) -> None:
    """Change the number of workers of a running job, at a step boundary.

    Exit code 0: the job takes it. 1: the job does not answer. 2: no such job, or a number of
    workers that it cannot have.
    """
    run_remotely(address, "scale", name, workers)
    # Here, because it brings ray with it, and `--help` must not wait for it.
    from rayzero.orchestrator.cli.running_job import scale_job

    raise typer.Exit(scale_job(name, workers, address))


@app.command(epilog="Example: rayzero chaos gpt 'kill(rank=1)' 'full_disk(step=200)'")
def chaos(
    name: Annotated[str, typer.Argument(help="The job's name.", metavar="NAME")] = "",
    faults: Annotated[
        list[str] | None,
        typer.Argument(
            help="What is to break, such as kill(rank=1). Without a step: the one at work.",
            metavar="FAULT...",
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Print the fault language instead.")] = False,
    count: Annotated[
        int | None,
        typer.Option(
            "--random", min=1, metavar="N", help="Print N random faults for a job file instead."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random faults.")] = 0,
    ranks: Annotated[int, typer.Option(help="Workers of the job they are for.")] = 2,
    steps: Annotated[int, typer.Option(help="Steps of the job they are for.")] = 100,
    address: ClusterAddress = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value on stdout.")] = False,
) -> None:
    """Make something break in a running job, to see it repaired.

    Exit code 0: it is scheduled. 1: the job does not answer. 2: no such job, or a fault that it
    cannot have.
    """
    # Here, because it brings ray with it, and `--help` must not wait for it.
    from rayzero.orchestrator.cli import running_job as command

    if show:
        raise typer.Exit(command.print_fault_language(as_json))
    if count is not None:
        raise typer.Exit(command.print_random_faults(count, seed, ranks, steps, as_json))
    if not (name and faults):
        raise typer.BadParameter("a job's name and a fault, or --list, or --random")
    run_remotely(address, "chaos", name, *faults, as_json=as_json)
    raise typer.Exit(command.inject_faults(name, faults, address, as_json))


@app.command(epilog="Example: rayzero top gpt, rayzero top http://127.0.0.1:9400")
def top(
    job: Annotated[
        str,
        typer.Argument(
            help="The job's name, or where it serves its page (metrics.port).", metavar="NAME|URL"
        ),
    ],
    address: ClusterAddress = None,
    once: Annotated[
        bool, typer.Option("--once", help="Show the job as it is now, and end.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The job's snapshot as JSON, one a line.")
    ] = False,
) -> None:
    """Watch a job: state, progress, loss, ranks, faults, lost time and checkpoints.

    By name, in the cluster that --address says; or by the URL of its page, from wherever that can
    be reached.

    Exit code 0: the job has ended, however it did. 1: nothing answers. 2: no such job or address.
    130: left by Ctrl-C.
    """
    # Here, because it brings rich with it, and `--help` must not wait for it.
    from rayzero.orchestrator.cli.running_job import watch_job

    raise typer.Exit(watch_job(job, address, once, as_json))


@app.command(epilog="Example: rayzero plan models:make --batch models:batch --world 8 --gpu 80GB")
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A function that builds the model. Nothing is allocated.",
            metavar="MODULE:FUNCTION",
        ),
    ],
    batch: Annotated[
        str | None,
        typer.Option(
            help="A function of a number of samples that makes a micro-batch; without it, "
            "activations are left out.",
            metavar="MODULE:FUNCTION",
        ),
    ] = None,
    engine: Annotated[
        Path | None,
        typer.Option(help="An engine config; its stage is varied. Default: fp32 with AdamW."),
    ] = None,
    world: Annotated[int, typer.Option(min=1, help="Number of GPUs.")] = 1,
    gpu: Annotated[
        str | None, typer.Option(help="Memory of one GPU, to find what fits.", metavar="80GB")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value on stdout.")] = False,
) -> None:
    """Estimate each GPU's memory by class, for every stage, and pick what fits.

    Exit code 0: done. 1: nothing fits. 2: a mistake in what was given.
    """
    # Here, because it brings rich's tables and pydantic with it, and `--help` must not wait.
    from rayzero.orchestrator.cli.plan import plan_model

    raise typer.Exit(plan_model(model, batch, engine, world, gpu, as_json))


@app.command(epilog="Example: rayzero doctor --checkpoint s3://bucket/runs --address auto")
def doctor(
    checkpoint: Annotated[
        str,
        typer.Option(
            help="Where checkpoints shall go: a folder, which need not be there yet, or a URL.",
            metavar="PATH",
        ),
    ] = "runs",
    address: Annotated[
        str | None,
        typer.Option(help="host:port of a Ray cluster, or `auto`. Default: RAY_ADDRESS, or none."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value on stdout.")] = False,
) -> None:
    """Check Python, torch, gloo and NCCL, Ray, shared memory and storage, and say what to fix.

    Exit code 0: jobs can run, warnings or not. 1: something keeps them from it.
    """
    # Here, because it brings ray with it, and `--help` must not wait for it.
    from rayzero.orchestrator.cli.running_job import run_doctor

    raise typer.Exit(run_doctor(checkpoint, address, as_json))
