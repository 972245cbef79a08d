"""Each alert fires where it should, stays silent next to it, and has its paragraph for whoever is
called by it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.alert_cases import CASES, CHANGED, Case
from tests.deploy.alerts import alerts, text
from tests.deploy.prometheus import ALERTS, promtool
from tests.deploy.test_dashboard import unknown
from tests.house.source import ROOT


def by_name(document: Any) -> dict[str, Any]:
    return {rule["alert"]: rule for group in document["groups"] for rule in group["rules"]}


RULES = by_name(yaml.safe_load(ALERTS.read_text(encoding="utf-8")))
SOURCE = (ROOT / "helm/rayzero/files/rules.yaml").read_text(encoding="utf-8")
RUNBOOK = "https://docs.example.com/operations"
OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", OPERATIONS, re.MULTILINE | re.DOTALL))


def test_every_series_asked_for_is_told_by_a_job() -> None:
    assert unknown(rule["expr"] for rule in RULES.values()) == []


@pytest.mark.parametrize("name", RULES)
def test_an_alert_says_what_how_bad_and_where_to_read_on(name: str) -> None:
    rule = RULES[name]
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert set(rule["annotations"]) == {"summary", "description"}  # no address is known
    assert "$labels.job" in rule["annotations"]["summary"]
    told = by_name(alerts(runbookUrl=RUNBOOK))[name]["annotations"]
    assert told["runbook_url"] == f"{RUNBOOK}#{name.lower()}"


def test_the_file_is_what_the_chart_makes() -> None:
    """`python -m tests.deploy.alerts` writes it anew."""
    assert ALERTS.read_text(encoding="utf-8") == text()


def test_every_alert_has_values_of_its_own() -> None:
    """Each can be left out, slowed, labelled; and where an expression has a number, it is there."""
    off = {name: {"enabled": False} for name in RULES if name != "RayzeroStraggler"}
    assert set(by_name(alerts(alerts=off))) == {"RayzeroStraggler"}
    changed = {name: {"for": "7m", "severity": "info", "labels": {"team": name}} for name in RULES}
    slow = by_name(alerts(alertLabels={"team": "a", "tier": "1"}, alerts=changed))
    for name, rule in slow.items():
        assert (rule["for"], rule["labels"]) == (
            "7m",
            {"severity": "info", "team": name, "tier": "1"},
        )
        assert rule["expr"] == RULES[name]["expr"]
    assert not [name for name, rule in slow.items() if "THRESHOLD" in rule["expr"]]


@pytest.mark.parametrize("name", RULES)
def test_an_alert_has_its_paragraph(name: str) -> None:
    """What it means, what to look at, and what to do by which command or setting."""
    text = SECTIONS[name]
    assert re.findall(r"\*\*(\w+)", text) == ["Means", "Look", "Do"]
    assert "`" in text.split("**Do")[1]


def test_there_is_no_paragraph_without_an_alert() -> None:
    assert {name for name in SECTIONS if name.startswith("Rayzero")} == set(RULES)


def test_every_alert_is_tried_both_ways() -> None:
    tried = {(case.alert, case.value is not None) for case in CASES}
    assert tried == {(name, fires) for name in RULES for fires in (True, False)}
    thresholds = {case.alert for case in CHANGED if "threshold" in case.changed}
    assert thresholds == {
        rule["alert"] for rule in yaml.safe_load(SOURCE) if "THRESHOLD" in rule["expr"]
    }


def test_promtool_reads_the_rules() -> None:
    assert "SUCCESS" in promtool("check", "rules", str(ALERTS), cwd=ROOT)


def test_alerts_fire_where_they_should_and_not_next_to_it(tmp_path: Path) -> None:
    tests = [situation(case) for case in CASES]
    write(tmp_path, tests, ALERTS)
    promtool("test", "rules", "tests.yaml", cwd=tmp_path)


def test_thresholds_and_times_are_the_charts_values(tmp_path: Path) -> None:
    document = alerts(alerts={case.alert: dict(case.changed) for case in CHANGED})
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(document), encoding="utf-8")
    tests = [situation(case, by_name(document)) for case in CHANGED]
    write(tmp_path, tests, rules)
    promtool("test", "rules", "tests.yaml", cwd=tmp_path)
    write(tmp_path, tests, ALERTS)  # the defaults judge each of them otherwise
    with pytest.raises(AssertionError) as caught:
        promtool("test", "rules", "tests.yaml", cwd=tmp_path)
    assert [case.alert for case in CHANGED if case.alert not in str(caught.value)] == []


def test_a_case_that_is_wrong_shows(tmp_path: Path) -> None:
    fires = next(case for case in CASES if case.value is not None)
    wrong = situation(fires)
    wrong["alert_rule_test"][0]["exp_alerts"] = []
    write(tmp_path, [wrong], ALERTS)
    with pytest.raises(AssertionError, match="RayzeroJobFailed"):
        promtool("test", "rules", "tests.yaml", cwd=tmp_path)


def write(folder: Path, tests: list[dict[str, Any]], rules: Path) -> None:
    document = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")


def situation(case: Case, rules: dict[str, Any] = RULES) -> dict[str, Any]:
    """A case in promtool's words."""
    series = [{"series": with_job(one), "values": values} for one, values in case.series.items()]
    asked = {"eval_time": case.at, "alertname": case.alert, "exp_alerts": expected(case, rules)}
    name = f"{case.alert}: {case.what}"
    return {"name": name, "interval": "1m", "input_series": series, "alert_rule_test": [asked]}


def expected(case: Case, rules: dict[str, Any]) -> list[dict[str, Any]]:
    if case.value is None:
        return []
    rule = rules[case.alert]
    labels = {"job": "gpt", **case.labels}
    annotations = {
        key: render_scenario(text, labels, case.value) for key, text in rule["annotations"].items()
    }
    return [{"exp_labels": labels | rule["labels"], "exp_annotations": annotations}]


def with_job(series: str) -> str:
    name, brace, labels = series.partition("{")
    return f'{name}{{job="gpt",{labels}' if brace else f'{name}{{job="gpt"}}'


def render_scenario(text: str, labels: dict[str, str], value: str) -> str:
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)
    return re.sub(r"\{\{ \$value[^}]*\}\}", value, text)
