"""Generates the alert rules file for a Prometheus without the operator from the chart's defaults.

`python -m tests.deploy.alerts` updates the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rayzero.orchestrator.metrics.catalog import CATALOG
from tests.deploy.chart import Object, objects_of_kind, render
from tests.deploy.manifests import yaml_text
from tests.deploy.prometheus import ALERTS

_HEADER = (
    "# Generated from the chart by `python -m tests.deploy.alerts`; "
    "change files/rules.yaml instead.\n"
)
_KEY_ORDER = ("alert", "expr", "for", "labels", "annotations")


def render_alerts(**values: Any) -> Object:
    """The chart's rule groups, with these values of `metrics.prometheusRule`."""
    objects = render({"metrics": {"prometheusRule": {"enabled": True, **values}}})
    spec: Object = objects_of_kind(objects, "PrometheusRule")[0]["spec"]
    return spec


def alerts_text() -> str:
    """The content of the file."""
    document = render_alerts()
    for group in document["groups"]:
        group["rules"] = [
            {key: rule[key] for key in _KEY_ORDER if key in rule} for rule in group["rules"]
        ]
    return _HEADER + yaml_text(document, width=10_000)


def uncataloged_series(exprs: Iterator[str]) -> list[str]:
    names = {name for expr in exprs for name in re.findall(r"\brayzero_\w+", expr)}
    return sorted(name for name in names if base_series(name) not in CATALOG)


def base_series(name: str) -> str:
    """The catalog name of a series: that of the histogram for its buckets, sum and count."""
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    return base if base in CATALOG and CATALOG[base].kind == "histogram" else name


if __name__ == "__main__":
    ALERTS.write_text(alerts_text(), encoding="utf-8")
