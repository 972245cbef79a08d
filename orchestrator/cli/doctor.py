"""`rayzero doctor`: check whether jobs can run on this machine and cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayzero.orchestrator.cli.command import JOBS_FOLDER, JsonValueFlag, local_command, new_group

if TYPE_CHECKING:
    from rayzero.orchestrator.doctor.diagnose import Finding

commands = new_group()


@commands.command(epilog="Example: rayzero doctor --checkpoint s3://bucket/runs --address auto")
@local_command
def doctor(
    checkpoint: Annotated[
        str,
        typer.Option(
            help="Folder or URL for checkpoints (checkpoint.path); it may not exist yet.",
            metavar="PATH",
        ),
    ] = JOBS_FOLDER,
    address: Annotated[
        str | None,
        typer.Option(
            help="host:port of a Ray cluster, or `auto`. Default: $RAY_ADDRESS; otherwise no "
            "cluster is checked."
        ),
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(help="Job file, whose workers.env is checked, too.", metavar="FILE"),
    ] = None,
    as_json: JsonValueFlag = False,
) -> int:
    """Check Python, torch, gloo and NCCL, Ray, shared memory and storage, and suggest fixes.

    Exit code 0: jobs can run, perhaps with warnings. 1: jobs cannot run. 2: a mistake in the job
    file.
    """
    from rayzero.orchestrator.cluster.addresses import head_address
    from rayzero.orchestrator.doctor.collect import collect_facts
    from rayzero.orchestrator.doctor.diagnose import Severity, diagnose, worst_severity
    from rayzero.orchestrator.job_file import load_job

    env = {} if job is None else load_job(job).workers.env
    findings = diagnose(collect_facts(checkpoint, head_address(address).text, env))
    level = worst_severity(findings)
    if as_json:
        print(json.dumps({"level": level, "findings": [asdict(finding) for finding in findings]}))
    else:
        print("\n".join(report_lines(findings)))
    return 1 if level is Severity.FAIL else 0


def report_lines(findings: Sequence[Finding]) -> list[str]:
    """Returns a line for each finding, and a second line with the fix if the finding is not OK."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<4}  {finding.name:<{width}}  {finding.seen}")
        if finding.fix and finding.level != "ok":
            lines.append(f"{'':<6}{'':<{width}}  fix: {finding.fix}")
    return lines
