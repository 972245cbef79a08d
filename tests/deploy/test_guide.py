"""README.md and docs/kubernetes.md: values that they name exist, and their commands fit what the
chart renders for them."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import yaml

from rayzero.orchestrator.spec import JobSpec
from tests.deploy.chart import (
    CHART,
    Object,
    pods,
    ports_of,
    render,
    render_scenario,
    scenario_values,
)
from tests.house.blocks import blocks
from tests.house.source import ROOT

PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/kubernetes.md")
}
GUIDE = PAGES["docs/kubernetes.md"]
LINES = [
    line.strip()
    for page in PAGES
    for block in blocks(page)
    if block.language == "bash"
    for line in block.lines()
]
INSTALLS = [line for line in LINES if re.match(r"helm install \S+ helm/rayzero", line)]
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))


@cache
def installed(command: str) -> list[Object]:
    """What a `helm install` makes, its values checked by the chart's schema."""
    words = shlex.split(command, comments=True)
    given = {a: b for a, b in pairwise(words) if a.startswith("-")}
    path = ROOT / given["-f"]
    assert path.is_file()
    settings = (text.partition("=") for text in given["--set"].split(","))
    values: Any = scenario_values(path.stem)
    for key, _, value in settings:
        section, _, last = key.rpartition(".")
        values[section] = values.get(section, {}) | {last: yaml.safe_load(value)}
    assert values["image"]["repository"]
    return render(values, release=words[2], namespace=given.get("-n", "default"))


def has_value(path: str) -> bool:
    """Whether the schema has a value: the job file's keys are in a definition of their own."""
    node: Any = SCHEMA
    for part in path.split("."):
        node = SCHEMA["$defs"][node["$ref"].rsplit("/", 1)[-1]] if "$ref" in node else node
        properties = node.get("properties", {})
        if part not in properties:
            return False
        node = properties[part]
    return True


def test_values_exist() -> None:
    named = re.findall(r"`([a-z]\w*(?:\.\w+)+)\b[^`/]*`", GUIDE)
    top = SCHEMA["properties"].keys()
    paths = {path for path in named if path.partition(".")[0] in top}
    assert len(paths) >= 20
    job = JobSpec.model_json_schema()["properties"]
    own = {path for path in named if path.partition(".")[0] in job}  # `checkpoint.path`
    assert [path for path in sorted(paths) if not (has_value(path) or path in own)] == []
    assert not has_value("workers.minimum")


@pytest.mark.parametrize("command", INSTALLS)
def test_installs_are_valid_and_need_only_what_the_page_names(command: str) -> None:
    objects = installed(command)
    made = re.findall(r"create secret generic (\S+)", GUIDE)
    assert {*re.findall(r'"secretName": "([^"]+)"', json.dumps(objects))} <= {*made}
    classes = {pod["spec"].get("priorityClassName", "") for pod in pods(objects)}
    assert classes == {""}, "a priority class that the page does not create"
    monitoring = [item for item in objects if item["apiVersion"].startswith("monitoring")]
    assert not monitoring or "Prometheus operator" in GUIDE


def test_services_ports_and_secrets_of_kubectl_exist() -> None:
    objects = [item for command in INSTALLS for item in installed(command)]
    clusters = [item for item in objects if item["kind"] in ("RayCluster", "RayJob")]
    services = {f"{item['metadata']['name']}-head-svc" for item in clusters}
    ports = {
        str(port)
        for command in INSTALLS
        for port in ports_of(list(pods(installed(command)))).values()
    }
    forwards = [line for line in LINES if line.startswith("kubectl port-forward")]
    assert len(forwards) == 2
    for line in forwards:
        assert {*re.findall(r"svc/(\S+)", line)} <= services
        assert {*re.findall(r" (\d{4,5})\b", line)} <= ports
    text = json.dumps([*objects, *render_scenario("s3")])  # whose secret the guide makes
    for secret in re.findall(r"create secret generic (\S+)", GUIDE):
        assert f'"{secret}"' in text
