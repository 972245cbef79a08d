"""The chart rendered by Helm itself, and helpers to query the rendered objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from tests.house.source import ROOT

CHART = ROOT / "helm/rayzero"
RELEASE, NAMESPACE = "demo", "team"
Object = dict[str, Any]


def nested(dotted: Mapping[str, Any]) -> Object:
    """The values of dotted keys, as of `helm --set`."""
    values: Object = {}
    for path, value in dotted.items():
        node = values
        *outer, last = path.split(".")
        for part in outer:
            node = node.setdefault(part, {})
        node[last] = value
    return values


def cases(section: str) -> dict[str, Any]:
    """A section of `cases.yaml`: by name the values, or a list that begins with them."""
    document = yaml.safe_load((ROOT / "tests/deploy/cases.yaml").read_text(encoding="utf-8"))
    return {
        name: [nested(case[0]), *case[1:]] if isinstance(case, list) else nested(case)
        for name, case in document[section].items()
    }


SCENARIOS = {"default": None} | {path.stem: path for path in sorted((CHART / "ci").glob("*.yaml"))}
WITH_SCENARIOS = pytest.mark.parametrize("scenario", SCENARIOS)


def scenario_values(name: str) -> Object:
    path = SCENARIOS[name]
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path else {}


def render_text(
    values: Mapping[str, Any], release: str = RELEASE, namespace: str = NAMESPACE
) -> dict[str, str]:
    """The rendered text of every template, NOTES.txt included, by path in the chart. The image,
    which every user gives, is `rayzero` unless the values name it."""
    values = {**values, "image": {"repository": "rayzero", **values.get("image", {})}}
    with helm_python.Chart.load(str(CHART)) as chart:
        chart.validate_schema(dict(values))
        texts = chart.render(dict(values), name=release, namespace=namespace)
    return {path.removeprefix("rayzero/"): text for path, text in texts.items()}


def render(
    values: Mapping[str, Any], release: str = RELEASE, namespace: str = NAMESPACE
) -> list[Object]:
    """All objects that the chart renders for some values."""
    return parse(render_text(values, release, namespace))


def parse(texts: Mapping[str, str]) -> list[Object]:
    files = [text for path, text in sorted(texts.items()) if path.endswith(".yaml")]
    return [item for text in files for item in yaml.load_all(text, yaml.CSafeLoader) if item]


@cache
def scenario_texts(scenario: str) -> dict[str, str]:
    """`render_text` for a scenario."""
    return render_text(scenario_values(scenario))


@cache
def render_scenario(scenario: str) -> tuple[Object, ...]:
    """`render` for a scenario. The result is cached: do not modify it."""
    return tuple(parse(scenario_texts(scenario)))


def objects_of_kind(objects: Sequence[Object], kind: str) -> list[Object]:
    return [item for item in objects if item["kind"] == kind]


def cluster_spec(objects: Sequence[Object]) -> Object:
    """The spec of the RayCluster, which may be embedded in a RayJob."""
    jobs = objects_of_kind(objects, "RayJob")
    (spec,) = [job["spec"]["rayClusterSpec"] for job in jobs] or [
        cluster["spec"] for cluster in objects_of_kind(objects, "RayCluster")
    ]
    return spec


def pods(objects: Sequence[Object]) -> Iterator[Object]:
    """Every pod and pod template, as {metadata, spec}."""
    yield from objects_of_kind(objects, "Pod")
    for job in objects_of_kind(objects, "RayJob"):
        if "submitterPodTemplate" in job["spec"]:
            yield job["spec"]["submitterPodTemplate"]
    spec = cluster_spec(objects)
    yield spec["headGroupSpec"]["template"]
    yield from (group["template"] for group in spec["workerGroupSpecs"])


def find_pod(objects: Sequence[Object], component: str) -> Object:
    """The first pod with this app.kubernetes.io/component label."""
    label = "app.kubernetes.io/component"
    return next(pod for pod in pods(objects) if pod["metadata"]["labels"][label] == component)


def container_of(objects: Sequence[Object], component: str) -> Object:
    """Ray's container of the first pod with this label."""
    container: Object = find_pod(objects, component)["spec"]["containers"][0]
    return container


def ports_of(some_pods: Sequence[Object]) -> dict[str, int]:
    """The ports of pods by name."""
    return {
        port["name"]: port["containerPort"]
        for pod in some_pods
        for container in pod["spec"]["containers"]
        for port in container.get("ports", ())
    }


def job_files(objects: Sequence[Object], folder: Path) -> None:
    """Writes the files of the config map with the job file."""
    config_maps = [item["data"] for item in objects_of_kind(objects, "ConfigMap")]
    (data,) = [data for data in config_maps if "job.yaml" in data]
    for name, text in data.items():
        (folder / name).write_text(text, encoding="utf-8")


def select_pods(scenario: str, selector: Object) -> list[Object]:
    labels = selector["matchLabels"].items()
    return [
        pod
        for pod in pods(render_scenario(scenario))
        if labels <= pod["metadata"]["labels"].items()
    ]
