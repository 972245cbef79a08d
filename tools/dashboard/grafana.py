"""Renders the Grafana dashboard from its rows of panels.

`python -m tools.dashboard.grafana [FILE]` in the root of the source tree writes it, by default into
the Helm chart. `tests/deploy/test_dashboard.py` fails if the file in the chart is out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.dashboard.faults import CHECKPOINTS_ROW, FAULTS_ROW
from tools.dashboard.overview import MEMORY_ROW, OVERVIEW_ROW, SPEED_ROW
from tools.dashboard.panels import DashboardRow, Panel, Query
from tools.dashboard.roles import ROLES_ROW
from tools.dashboard.streams import STREAMS_ROW

Json = dict[str, Any]

DASHBOARD_ROWS = (
    OVERVIEW_ROW,
    SPEED_ROW,
    MEMORY_ROW,
    FAULTS_ROW,
    CHECKPOINTS_ROW,
    STREAMS_ROW,
    ROLES_ROW,
)

ANNOTATIONS = {
    "Generations": ('changes(rayzero_generation{job="$job"}[$__interval]) > 0', "purple"),
    "Faults": (
        'sum(rayzero_faults_total{job="$job"})'
        ' > (sum(rayzero_faults_total{job="$job"} offset $__interval) or vector(0))',
        "red",
    ),
}
"""Marks on every graph."""

_GRID_COLUMNS = 24
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard_text() -> str:
    """The dashboard as JSON text."""
    return json.dumps(make_dashboard(), indent=1) + "\n"


def make_dashboard() -> Json:
    return {
        "title": "rayzero",
        "uid": "rayzero",
        "description": "A training job: its speed, memory, faults and checkpoints.",
        "tags": ["rayzero"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "refresh": "10s",
        "templating": {"list": list(_variables())},
        "annotations": {"list": list(_annotations())},
        "panels": list(_panels()),
        "links": [],
    }


def list_expressions() -> Iterator[tuple[str, str]]:
    """(title, expression) of every Prometheus query."""
    for name, (expr, _) in ANNOTATIONS.items():
        yield name, expr
    for section in DASHBOARD_ROWS:
        for panel in section.panels:
            for query in panel.queries:
                yield f"{section.title} / {panel.title} / {query.legend}", query.expr


def _variables() -> Iterator[Json]:
    yield {"name": "datasource", "label": "Source", "type": "datasource", "query": "prometheus"}
    yield _variable("job", "Job", "label_values(rayzero_state, job)", multi=False)
    yield _variable("rank", "Rank", 'label_values(rayzero_rank_step{job="$job"}, rank)', multi=True)


def _variable(name: str, label: str, query: str, multi: bool) -> Json:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 3,
        "multi": multi,
        "includeAll": multi,
        "allValue": ".*" if multi else None,
        "current": {"text": "All", "value": "$__all"} if multi else {},
    }


def _annotations() -> Iterator[Json]:
    for name, (expr, color) in ANNOTATIONS.items():
        yield {
            "name": name,
            "datasource": _DATASOURCE,
            "enable": True,
            "iconColor": color,
            "expr": expr,
            "titleFormat": name,
        }


def _panels() -> Iterator[Json]:
    number, top = 0, 0
    for section in DASHBOARD_ROWS:
        number += 1
        yield _row_panel(number, section, top)
        left, top, tallest = 0, top + 1, 0
        for panel in section.panels:
            number += 1
            if left + panel.width > _GRID_COLUMNS:
                left, top, tallest = 0, top + tallest, 0
            grid_position = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            yield _panel(number, panel, grid_position)
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest


def _row_panel(number: int, section: DashboardRow, top: int) -> Json:
    grid_position = {"x": 0, "y": top, "w": _GRID_COLUMNS, "h": 1}
    return {
        "id": number,
        "type": "row",
        "title": section.title,
        "collapsed": False,
        "gridPos": grid_position,
        "panels": [],
    }


def _panel(number: int, panel: Panel, grid_position: Json) -> Json:
    targets = [_target(chr(ord("A") + number), query) for number, query in enumerate(panel.queries)]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": grid_position,
        "targets": targets,
        "fieldConfig": {
            "defaults": _field_defaults(panel),
            "overrides": list(_right_axis_overrides(panel)),
        },
        "options": _panel_options(panel),
    }


def _target(letter: str, query: Query) -> Json:
    return {
        "refId": letter,
        "datasource": _DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "range": True,
    }


def _field_defaults(panel: Panel) -> Json:
    steps = [{"value": value, "color": color} for value, color in panel.thresholds]
    defaults: Json = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.maximum is not None:
        defaults |= {"min": 0, "max": panel.maximum}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none"}
        thresholds_style = "dashed" if len(steps) > 1 else "off"
        defaults["custom"] = {
            "fillOpacity": 40 if panel.stacked else 0,
            "stacking": stacking,
            "thresholdsStyle": {"mode": thresholds_style},
            "spanNulls": False,
            "showPoints": "auto",
        }
    return defaults


def _right_axis_overrides(panel: Panel) -> Iterator[Json]:
    """Series that use the right axis."""
    for query in panel.queries:
        if query.axis == "right":
            properties = [
                {"id": "custom.axisPlacement", "value": "right"},
                {"id": "custom.stacking", "value": {"mode": "none"}},
                {"id": "custom.fillOpacity", "value": 0},
                {"id": "unit", "value": "none"},
                {"id": "max"},
            ]
            yield {
                "matcher": {"id": "byName", "options": query.legend},
                "properties": properties,
            }


def _panel_options(panel: Panel) -> Json:
    if panel.kind == "timeseries":
        return {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    reduce_options = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if panel.kind == "gauge":
        return {"reduceOptions": reduce_options, "showThresholdMarkers": True}
    return {
        "reduceOptions": reduce_options,
        "textMode": "name" if panel.show_names else "auto",
        "colorMode": "value",
        "graphMode": "none",
    }


CHART_FILE = Path("helm/rayzero/files/dashboard.json")
"""In the root of the source tree."""

if __name__ == "__main__":
    (Path(sys.argv[1]) if sys.argv[1:] else CHART_FILE).write_text(
        dashboard_text(), encoding="utf-8"
    )
