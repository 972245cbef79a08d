"""`rayzero doctor`: what is found, in lines or as one JSON value."""

from __future__ import annotations

import json
from dataclasses import asdict

from rayzero.orchestrator.cli.codes import with_exit_code
from rayzero.orchestrator.cluster import head_address
from rayzero.orchestrator.doctor.facts import Finding, Level
from rayzero.orchestrator.doctor.gather import gather
from rayzero.orchestrator.doctor.judge import judge, worst


@with_exit_code
def examine(place: str, address: str | None, as_json: bool) -> int:
    """Prints the report; 1 if something keeps jobs from running."""
    findings = judge(gather(place, head_address(address)))
    level = worst(findings)
    if as_json:
        print(json.dumps({"level": level, "findings": [asdict(one) for one in findings]}))
    else:
        for line in report(findings):
            print(line)
    return 1 if level is Level.FAIL else 0


def report(findings: list[Finding]) -> list[str]:
    """A line for each finding, and one for what to change."""
    width = max(len(one.name) for one in findings)
    lines = []
    for one in findings:
        lines.append(f"{one.level:<4}  {one.name:<{width}}  {one.seen}")
        if one.fix and one.level is not Level.OK:
            lines.append(f"{'':<6}{'':<{width}}  to change it: {one.fix}")
    return lines
