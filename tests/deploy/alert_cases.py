"""Test cases of the alerts, from `alert_cases.yaml`: samples of a job, and whether one fires."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from rayzero.orchestrator.machine import State

Samples = Mapping[str, str]


@dataclass(frozen=True)
class Case:
    """Samples and the expected state of an alert.

    Args:
        eval_time: when the alert is evaluated.
        series: samples by series, without the label `job`.
        value: the value in the alert's description; None if the alert does not fire.
        labels: labels of the alert besides `job` and the severity.
        changed: the chart's values of this alert.
    """

    alert: str
    description: str
    eval_time: str
    series: Samples
    value: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    changed: Mapping[str, object] = field(default_factory=dict)


def _load(section: str) -> tuple[Case, ...]:
    document = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    cases = []
    for alert, described in document[section].items():
        for description, fields in described.items():
            changed = fields.pop(0) if section == "changed" else {}
            eval_time, samples, *expected = fields
            series = {_series(name): values for name, values in samples.items()}
            cases.append(Case(alert, description, eval_time, series, *expected, changed=changed))
    return tuple(cases)


def _series(name: str) -> str:
    return f'rayzero_state{{state="{name}"}}' if name in {*State} else f"rayzero_{name}"


CASES = _load("defaults")
CASES_WITH_VALUES = _load("changed")
"""Alerts with other values than the defaults, under which they fire or stay silent."""
