"""Alert rules: when they fire, their chart values, and their runbook sections."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.alert_cases import CASES, CASES_WITH_VALUES, Case
from tests.deploy.alerts import alerts_text, render_alerts, uncataloged_series
from tests.deploy.prometheus import ALERTS, promtool
from tests.house.source import ROOT


def rules_by_name(document: Any) -> dict[str, Any]:
    return {rule["alert"]: rule for group in document["groups"] for rule in group["rules"]}


RULES = rules_by_name(yaml.safe_load(ALERTS.read_text(encoding="utf-8")))
SOURCE = (ROOT / "helm/rayzero/files/rules.yaml").read_text(encoding="utf-8")
RUNBOOK = "https://docs.example.com/operations"
OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", OPERATIONS, re.MULTILINE | re.DOTALL))


def test_alerts_use_only_cataloged_series() -> None:
    assert uncataloged_series(rule["expr"] for rule in RULES.values()) == []


@pytest.mark.parametrize("name", RULES)
def test_alert_has_severity_summary_and_runbook(name: str) -> None:
    rule = RULES[name]
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert set(rule["annotations"]) == {"summary", "description"}  # without a runbookUrl
    assert "$labels.job" in rule["annotations"]["summary"]
    annotations = rules_by_name(render_alerts(runbookUrl=RUNBOOK))[name]["annotations"]
    assert annotations["runbook_url"] == f"{RUNBOOK}#{name.lower()}"


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


@pytest.mark.parametrize("name", RULES)
def test_alert_has_runbook_section(name: str) -> None:
    """What the alert means, what to look at, and the command or setting to use."""
    text = SECTIONS[name]
    assert re.findall(r"\*\*(\w+)", text) == ["Means", "Look", "Do"]
    assert "`" in text.split("**Do")[1]


def test_every_runbook_section_has_alert() -> None:
    assert {name for name in SECTIONS if name.startswith("Rayzero")} == set(RULES)


def test_every_alert_has_firing_and_silent_cases() -> None:
    covered = {(case.alert, case.value is not None) for case in CASES}
    assert covered == {(name, fires) for name in RULES for fires in (True, False)}
    thresholds = {case.alert for case in CASES_WITH_VALUES if "threshold" in case.changed}
    assert thresholds == {
        rule["alert"] for rule in yaml.safe_load(SOURCE) if "THRESHOLD" in rule["expr"]
    }


def test_promtool_parses_rules() -> None:
    assert "SUCCESS" in promtool("check", "rules", str(ALERTS), cwd=ROOT)


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


def test_wrong_case_fails(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.value is not None)
    wrong = rule_test(case)
    wrong["alert_rule_test"][0]["exp_alerts"] = []
    write_tests(tmp_path, [wrong], ALERTS)
    with pytest.raises(AssertionError, match="RayzeroJobFailed"):
        promtool("test", "rules", "tests.yaml", cwd=tmp_path)


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
