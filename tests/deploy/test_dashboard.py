"""The dashboard file is up to date, and its expressions match the metrics catalog."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard as Model

from rayzero.orchestrator.metrics.catalog import CATALOG
from tests.deploy.alerts import base_series, uncataloged_series
from tests.deploy.prometheus import promtool, recording_rules, substitute_variables
from tests.house.source import ROOT
from tools.dashboard.grafana import dashboard_text, list_expressions, make_dashboard

PANELS = [panel for panel in make_dashboard()["panels"] if panel["type"] != "row"]
COLORS = {"green", "orange", "red"}


def test_dashboard_file_is_up_to_date() -> None:
    """`python -m tools.dashboard.grafana` updates it."""
    text = (ROOT / "helm/rayzero/files/dashboard.json").read_text(encoding="utf-8")
    assert text == dashboard_text()


def test_fields_are_in_grafana_schema() -> None:
    """Grafana's own models drop unknown fields."""
    plugins.register_default_plugins()
    parsed = Model.from_json(make_dashboard())
    encoded = json.loads(JSONEncoder().encode(parsed))
    # Fields that Grafana or its Prometheus data source accepts but the models lack.
    allowed = {"titleFormat", "definition", "allValue"}
    assert set(dropped_fields(make_dashboard(), encoded)) <= allowed
    misspelled = make_dashboard()
    misspelled["panels"][1]["options"]["reduceOption"] = {}
    encoded = json.loads(JSONEncoder().encode(Model.from_json(misspelled)))
    assert "reduceOption" in set(dropped_fields(misspelled, encoded))


def dropped_fields(original: Any, encoded: Any) -> Iterator[str]:
    """Fields of `original` that are missing or different in `encoded`."""
    if isinstance(original, dict):
        for key, value in original.items():
            if key in encoded:
                yield from dropped_fields(value, encoded[key])
            else:
                yield key
    elif isinstance(original, list):
        for before, after in zip(original, encoded, strict=True):
            yield from dropped_fields(before, after)
    elif original != encoded:
        yield f"{original!r} is {encoded!r}"


def test_every_cataloged_series_has_panel_and_no_other() -> None:
    assert uncataloged_series(expr for _, expr in list_expressions()) == []
    expressions = " ".join(expr for _, expr in list_expressions())
    assert [name for name in CATALOG if not re.search(rf"\b{name}(_sum|\b)", expressions)] == []


def test_expressions_use_only_cataloged_labels() -> None:
    for panel, expr in list_expressions():
        for name, labels in re.findall(r"(rayzero_\w+)\{([^}]*)\}", expr):
            cataloged = {"job", *CATALOG[base_series(name)].labels}
            assert set(re.findall(r"(\w+)=", labels)) <= cataloged, panel


def test_panels_have_descriptions_and_units_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in make_dashboard()["panels"]}) == len(
        make_dashboard()["panels"]
    )
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert steps[0]["value"] is None, panel["title"]
        assert {step["color"] for step in steps} <= COLORS, panel["title"]
    for first, second in combinations(make_dashboard()["panels"], 2):
        titles = first["title"], second["title"]
        assert not overlap(first["gridPos"], second["gridPos"]), titles


def test_promtool_parses_every_expression(tmp_path: Path) -> None:
    expressions = {name: substitute_variables(expr) for name, expr in list_expressions()}
    (tmp_path / "rules.yaml").write_text(recording_rules(expressions), encoding="utf-8")
    output = promtool("check", "rules", "rules.yaml", cwd=tmp_path)
    assert f"{len(expressions)} rules found" in output


def overlap(first: dict[str, int], second: dict[str, int]) -> bool:
    return (
        first["x"] < second["x"] + second["w"]
        and second["x"] < first["x"] + first["w"]
        and first["y"] < second["y"] + second["h"]
        and second["y"] < first["y"] + first["h"]
    )
