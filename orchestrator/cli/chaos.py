"""`rayzero chaos`: inject faults into a running job."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Annotated

import typer

from rayzero.orchestrator.cli.command import (
    ClusterAddress,
    JsonValueFlag,
    cluster_command,
    new_group,
)

commands = new_group()


@commands.command(epilog="Example: rayzero chaos gpt 'kill(rank=1)' 'full_disk(step=200)'")
@cluster_command
def chaos(
    name_and_faults: Annotated[
        list[str] | None,
        typer.Argument(
            help="Name of the job, then faults such as kill(rank=1). A fault without a step is "
            "injected into the current one.",
            metavar="NAME FAULT...",
        ),
    ] = None,
    show_language: Annotated[
        bool, typer.Option("--list", help="Print the fault language instead.")
    ] = False,
    count: Annotated[
        int | None,
        typer.Option(
            "--random", min=1, metavar="N", help="Print N random faults for a job file instead."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random faults.")] = 0,
    ranks: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N",
            help="Number of workers for the random faults; ROLE:N for a role's. Default: 2.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Number of steps for the random faults.")] = 100,
    address: ClusterAddress = None,
    as_json: JsonValueFlag = False,
) -> None:
    """Inject faults into a running job, to test its recovery.

    Exit code 0: scheduled. 1: the job did not respond. 2: no such job, or a fault that cannot be
    injected into it.
    """
    if show_language:
        _print_fault_language(as_json)
        return
    if count is not None:
        _print_random_faults(count, seed, ranks or [], steps, as_json)
        return
    name, *faults = name_and_faults or [""]
    if not (name and faults):
        raise typer.BadParameter("a job's name and a fault are needed, or --list, or --random")
    from rayzero.orchestrator.job.actor import JobActor
    from rayzero.orchestrator.job.lookup import find_running
    from rayzero.workers.chaos.spec import parse_fault

    for text in faults:
        parse_fault(text, step=1)  # a syntax error needs no running job
    job = find_running(name, address)
    with closing(job.cluster):
        answer = job.process.call(JobActor.inject, faults)
    print(json.dumps({"job": name, "scheduled": answer.splitlines()}) if as_json else answer)


def _print_fault_language(as_json: bool) -> None:
    from rayzero.workers.chaos.spec import PHASES, all_fault_kinds, example_fault, fault_usage

    if as_json:
        kinds = [
            {
                "word": name,
                "where": kind.target,
                "does": kind.description,
                "required": kind.required,
                "defaults": dict(kind.defaults),
                "example": str(example_fault(name, of_role=kind.of_role)),
            }
            for name, kind in all_fault_kinds()
        ]
        print(json.dumps(kinds))
        return
    for name, kind in all_fault_kinds():
        usage = fault_usage(name, of_role=kind.of_role)
        example = example_fault(name, of_role=kind.of_role)
        print(f"{usage}\n    {kind.description}\n    {example}")
    print(f"\nphases: {', '.join(PHASES)}")
    print("how: flip, cut, remove")
    print("rank, node: from 0, in the order of ranks; worker: a number in its role, from 0")
    print("step: from 1; injected in that step, or at the first opportunity after it")


def _print_random_faults(
    count: int, seed: int, ranks: list[str], steps: int, as_json: bool
) -> None:
    import yaml

    from rayzero.workers.chaos.spec import random_faults

    workers = dict(map(_parse_ranks, ranks))
    faults = random_faults(seed, count, workers.pop("", 2), steps, roles=workers)
    schedule = {"faults": [str(fault) for fault in faults]}
    print(json.dumps(schedule) if as_json else yaml.safe_dump(schedule, width=1000).rstrip())


def _parse_ranks(text: str) -> tuple[str, int]:
    """Returns the role, empty for the ranks, and its number of workers."""
    role, _, workers = text.rpartition(":")
    if not workers.isdecimal():
        raise typer.BadParameter(f"--ranks {text!r}: a number of workers, or as rollout:2")
    return role, int(workers)
