"""The alerts for a Prometheus without an operator: what the chart makes of them by default.

`python -m tests.deploy.alerts` writes them anew.
"""

from __future__ import annotations

from typing import Any

import yaml

from tests.deploy.chart import Object, objects_of_kind, render
from tests.deploy.prometheus import ALERTS

_HEAD = "# Made of the chart by `python -m tests.deploy.alerts`; change files/rules.yaml instead.\n"
_ORDER = ("alert", "expr", "for", "labels", "annotations")


def alerts(**values: Any) -> Object:
    """The document of rules that the chart makes, with these values of `metrics.prometheusRule`."""
    objects = render({"metrics": {"prometheusRule": {"enabled": True, **values}}})
    spec: Object = objects_of_kind(objects, "PrometheusRule")[0]["spec"]
    return spec


def text() -> str:
    """The file."""
    document = alerts()
    for group in document["groups"]:
        group["rules"] = [{key: one[key] for key in _ORDER if key in one} for one in group["rules"]]
    return _HEAD + yaml.dump(document, Dumper=_Blocks, sort_keys=False, width=10_000)


class _Blocks(yaml.SafeDumper):
    """Texts of several lines as such."""


def _written(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Blocks.add_representer(str, _written)


if __name__ == "__main__":
    ALERTS.write_text(text(), encoding="utf-8")
