"""Alert rules: when they fire, their chart values, and their runbook sections.

Cases are in `alert_cases.yaml`: samples of a job, and whether an alert fires.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayzero.orchestrator.machine import State
from tests.deploy.alerts import alerts_text, render_alerts, uncataloged_series
from tests.deploy.prometheus import ALERTS, promtool
from tests.house.source import ROOT

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
    document = yaml.safe_load(
        Path(__file__).with_name("alert_cases.yaml").read_text(encoding="utf-8")
    )
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


def rules_by_name(document: Any) -> dict[str, Any]:
    return {rule["alert"]: rule for group in document["groups"] for rule in group["rules"]}


RULES = rules_by_name(yaml.safe_load(ALERTS.read_text(encoding="utf-8")))
SOURCE = (ROOT / "helm/rayzero/files/rules.yaml").read_text(encoding="utf-8")
RUNBOOK = "https://docs.example.com/operations"
OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", OPERATIONS, re.MULTILINE | re.DOTALL))


def test_alerts_are_complete() -> None:
    """Severity, summary, series of the catalog, and a section of the runbook: what the alert means,
    what to look at, and the command or setting to use."""
    assert uncataloged_series(rule["expr"] for rule in RULES.values()) == []
    assert {name for name in SECTIONS if name.startswith("Rayzero")} == set(RULES)
    with_runbook = rules_by_name(render_alerts(runbookUrl=RUNBOOK))
    for name, rule in RULES.items():
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert set(rule["annotations"]) == {"summary", "description"}  # without a runbookUrl
        assert "$labels.job" in rule["annotations"]["summary"]
        url = with_runbook[name]["annotations"]["runbook_url"]
        assert url == f"{RUNBOOK}#{name.lower()}"
        assert re.findall(r"\*\*(\w+)", SECTIONS[name]) == ["Means", "Look", "Do"]
        assert "`" in SECTIONS[name].split("**Do")[1]


def test_alerts_file_is_up_to_date() -> None:
    """`python -m tests.deploy.alerts` updates it."""
    assert ALERTS.read_text(encoding="utf-8") == alerts_text()


def test_every_alert_is_configurable() -> None:
    """Each alert can be disabled, delayed and labeled, and its threshold is a value."""
    off = {name: {"enabled": False} for name in RULES if name != "RayzeroStraggler"}
    assert set(rules_by_name(render_alerts(alerts=off))) == {"RayzeroStraggler"}
    changed = {name: {"for": "7m", "severity": "info", "labels": {"team": name}} for name in RULES}
    labels = {"team": "a", "tier": "1"}
    rules = rules_by_name(render_alerts(alertLabels=labels, alerts=changed))
    for name, rule in rules.items():
        assert rule["for"] == "7m"
        assert rule["labels"] == {"severity": "info", "team": name, "tier": "1"}
        assert rule["expr"] == RULES[name]["expr"]
    assert not [name for name, rule in rules.items() if "THRESHOLD" in rule["expr"]]


def test_every_alert_has_firing_and_silent_cases() -> None:
    covered = {(case.alert, case.value is not None) for case in CASES}
    assert covered == {(name, fires) for name in RULES for fires in (True, False)}
    thresholds = {case.alert for case in CASES_WITH_VALUES if "threshold" in case.changed}
    assert thresholds == {
        rule["alert"] for rule in yaml.safe_load(SOURCE) if "THRESHOLD" in rule["expr"]
    }


def test_alerts_fire_as_expected(tmp_path: Path) -> None:
    tests = [rule_test(case) for case in CASES]
    write_tests(tmp_path, tests, ALERTS)
    promtool("test", "rules", "tests.yaml", cwd=tmp_path)


def test_alerts_use_thresholds_and_durations_of_values(tmp_path: Path) -> None:
    values = {case.alert: dict(case.changed) for case in CASES_WITH_VALUES}
    document = render_alerts(alerts=values)
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(document), encoding="utf-8")
    tests = [rule_test(case, rules_by_name(document)) for case in CASES_WITH_VALUES]
    write_tests(tmp_path, tests, rules)
    promtool("test", "rules", "tests.yaml", cwd=tmp_path)
    write_tests(tmp_path, tests, ALERTS)  # with the default values, every case fails
    with pytest.raises(AssertionError) as caught:
        promtool("test", "rules", "tests.yaml", cwd=tmp_path)
    output = str(caught.value)
    assert [case.alert for case in CASES_WITH_VALUES if case.alert not in output] == []


def write_tests(folder: Path, tests: list[dict[str, Any]], rules: Path) -> None:
    document = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")


def rule_test(case: Case, rules: dict[str, Any] = RULES) -> dict[str, Any]:
    """A case in promtool's unit test format."""
    series = [{"series": with_job(name), "values": values} for name, values in case.series.items()]
    alert_test = {
        "eval_time": case.eval_time,
        "alertname": case.alert,
        "exp_alerts": expected_alerts(case, rules),
    }
    return {
        "name": f"{case.alert}: {case.description}",
        "interval": "1m",
        "input_series": series,
        "alert_rule_test": [alert_test],
    }


def expected_alerts(case: Case, rules: dict[str, Any]) -> list[dict[str, Any]]:
    if case.value is None:
        return []
    rule = rules[case.alert]
    labels = {"job": "gpt", **case.labels}
    annotations = {
        key: render_annotation(text, labels, case.value)
        for key, text in rule["annotations"].items()
    }
    return [{"exp_labels": labels | rule["labels"], "exp_annotations": annotations}]


def with_job(series: str) -> str:
    name, brace, labels = series.partition("{")
    return f'{name}{{job="gpt",{labels}' if brace else f'{name}{{job="gpt"}}'


def render_annotation(text: str, labels: dict[str, str], value: str) -> str:
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: labels[match[1]], text)
    return re.sub(r"\{\{ \$value[^}]*\}\}", value, text)
