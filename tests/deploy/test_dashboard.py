"""The dashboard is what its rows say, and asks for what a job tells."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard as Model

from rayzero.orchestrator.metrics.catalog import CATALOG
from tests.deploy.prometheus import filled, promtool, rules
from tests.house.source import ROOT
from tools.dashboard.grafana import DASHBOARD_ROWS, dashboard_text, list_expressions, make_dashboard

PANELS = [panel for panel in make_dashboard()["panels"] if panel["type"] != "row"]
COLOURS = {"green", "orange", "red"}


def test_the_file_in_the_chart_is_what_the_rows_give() -> None:
    """`python -m tools.dashboard.grafana` writes it anew."""
    text = (ROOT / "helm/rayzero/files/dashboard.json").read_text(encoding="utf-8")
    assert text == dashboard_text()


def test_grafana_knows_every_field() -> None:
    """The models of Grafana's own schema, which drop what they do not know."""
    plugins.register_default_plugins()
    read = Model.from_json(make_dashboard())
    back = json.loads(JSONEncoder().encode(read))
    # The first is the Prometheus source's own, the second the interface's; None says nothing.
    assert set(dropped(make_dashboard(), back)) <= {"titleFormat", "definition", "allValue"}
    misspelt = make_dashboard()
    misspelt["panels"][1]["options"]["reduceOption"] = {}
    with_it = json.loads(JSONEncoder().encode(Model.from_json(misspelt)))
    assert "reduceOption" in set(dropped(misspelt, with_it))


def dropped(one: Any, other: Any) -> Iterator[str]:
    """The fields that are in one, and not in the other."""
    if isinstance(one, dict):
        for key, value in one.items():
            if key in other:
                yield from dropped(value, other[key])
            else:
                yield key
    elif isinstance(one, list):
        for value, again in zip(one, other, strict=True):
            yield from dropped(value, again)
    elif one != other:
        yield f"{one!r} is {other!r}"


def test_every_series_asked_for_is_told_by_a_job() -> None:
    assert unknown(expr for _, expr in list_expressions()) == []


def test_every_series_that_a_job_tells_is_shown() -> None:
    asked = " ".join(expr for _, expr in list_expressions())
    assert [name for name in CATALOG if not re.search(rf"\b{name}(_sum|\b)", asked)] == []


def test_labels_asked_for_are_those_of_the_series() -> None:
    for where, expr in list_expressions():
        for name, labels in re.findall(r"(rayzero_\w+)\{([^}]*)\}", expr):
            told = {"job", *CATALOG[base(name)].labels}
            assert set(re.findall(r"(\w+)=", labels)) <= told, where


def test_rows_are_those_that_were_promised() -> None:
    titles = [section.title for section in DASHBOARD_ROWS]
    assert titles == ["Overview", "Speed", "Memory", "Faults", "Checkpoints"]
    names = [one["name"] for one in make_dashboard()["templating"]["list"]]
    assert names == ["datasource", "job", "rank"]


def test_panels_are_described_have_units_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in make_dashboard()["panels"]}) == len(
        make_dashboard()["panels"]
    )
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert steps[0]["value"] is None, panel["title"]
        assert {step["color"] for step in steps} <= COLOURS, panel["title"]
    for one, other in combinations(make_dashboard()["panels"], 2):
        assert not overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])


def test_the_overlap_of_panels_can_be_seen() -> None:
    here = {"x": 0, "y": 0, "w": 8, "h": 8}
    assert overlap(here, here | {"x": 7, "y": 7})
    assert not overlap(here, here | {"x": 8})


def test_promtool_reads_every_expression(tmp_path: Path) -> None:
    asked = {name: filled(expr) for name, expr in list_expressions()}
    (tmp_path / "rules.yaml").write_text(rules(asked), encoding="utf-8")
    said = promtool("check", "rules", "rules.yaml", cwd=tmp_path)
    assert f"{len(asked)} rules found" in said


def test_promtool_refuses_what_is_no_expression(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(rules({"bad": "rate(rayzero_step"}), encoding="utf-8")
    with pytest.raises(AssertionError, match="parse"):
        promtool("check", "rules", "rules.yaml", cwd=tmp_path)


def test_the_json_is_plain() -> None:
    assert json.loads(dashboard_text()) == make_dashboard()


def unknown(exprs: Iterator[str]) -> list[str]:
    names = {name for expr in exprs for name in re.findall(r"\brayzero_\w+", expr)}
    return sorted(name for name in names if base(name) not in CATALOG)


def base(name: str) -> str:
    """The series that a histogram's parts belong to."""
    whole = re.sub(r"_(bucket|sum|count)$", "", name)
    return whole if whole in CATALOG and CATALOG[whole].kind == "histogram" else name


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return (
        one["x"] < other["x"] + other["w"]
        and other["x"] < one["x"] + one["w"]
        and one["y"] < other["y"] + other["h"]
        and other["y"] < one["y"] + one["h"]
    )
