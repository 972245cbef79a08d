"""docs/kubernetes.md: values that it names exist, and its commands fit what the chart renders."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from typing import Any

import pytest
import yaml

from rayzero.orchestrator.spec import JobSpec
from tests.deploy.chart import (
    CHART,
    Object,
    find_pod,
    objects_of_kind,
    pods,
    render,
    scenario_values,
)
from tests.house.source import ROOT

PAGE = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^ *```bash\n(.*?)^ *```", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [
    re.sub(r"\s&$|\s+#.*", "", line.strip())
    for block in BLOCKS
    for line in block.splitlines()
    if line.strip()
]
INSTALLS = [
    line for line in COMMANDS if line.startswith("helm install") and str(CHART.name) in line
]
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))


def options(command: str) -> dict[str, str]:
    words = shlex.split(command)
    return {a: b for a, b in pairwise(words) if a.startswith("-")}


def installed(command: str) -> list[Object]:
    """What a `helm install` of the page makes."""
    given = options(command)
    path = given["-f"]
    assert (ROOT / path).is_file()
    values = scenario_values((ROOT / path).stem)
    for setting in filter(None, given.get("--set", "").split(",")):
        key, _, value = setting.partition("=")
        *outer, last = key.split(".")
        node: Any = values
        for part in outer:
            node = node.setdefault(part, {})
        node[last] = yaml.safe_load(value)
    assert values["image"]["repository"]
    return render(values, release=shlex.split(command)[2], namespace=given.get("-n", "default"))


def is_value(path: str) -> bool:
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
    named = re.findall(r"`([a-z]\w*(?:\.\w+)+)\b[^`/]*`", PAGE)
    top = SCHEMA["properties"].keys()
    paths = {path for path in named if path.partition(".")[0] in top}
    assert len(paths) >= 20
    job = JobSpec.model_json_schema()["properties"]
    own = {path for path in named if path.partition(".")[0] in job}  # `checkpoint.path`
    assert [path for path in sorted(paths) if not (is_value(path) or path in own)] == []
    assert not is_value("workers.minimum")


@pytest.mark.parametrize("command", INSTALLS)
def test_installs_are_valid_and_need_only_what_the_page_names(command: str) -> None:
    objects = installed(command)
    text = json.dumps(objects)
    made = re.findall(r"create secret generic (\S+)", PAGE)
    secrets = set(re.findall(r'"secretName": "([^"]+)"', text))
    assert secrets <= set(made)
    classes = {pod["spec"].get("priorityClassName", "") for pod in pods(objects)}
    assert classes == {""}, "a priority class that the page does not create"
    monitoring = [item for item in objects if item["apiVersion"].startswith("monitoring")]
    assert not monitoring or "Prometheus operator" in PAGE


def test_forwarded_services_and_ports_exist() -> None:
    (install,) = [line for line in INSTALLS if "ci/cluster.yaml" in line]
    objects = installed(install)
    (cluster,) = objects_of_kind(objects, "RayCluster")
    ports = find_pod(objects, "head")["spec"]["containers"][0]["ports"]
    numbers = {str(port["containerPort"]) for port in ports}
    forwards = [line.split()[2:] for line in COMMANDS if line.startswith("kubectl port-forward")]
    assert len(forwards) == 2
    (service, *opened), (*_, page) = forwards
    assert service == f"svc/{cluster['metadata']['name']}-head-svc"
    assert {*opened, page} <= numbers
