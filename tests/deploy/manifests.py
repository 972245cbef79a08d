"""Generates the manifests from the chart: a base, and overlays as patches of it.

`python -m tests.deploy.manifests` updates them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import yaml

from tests.deploy.chart import Object, render, scenario_values
from tests.house.source import ROOT

MANIFESTS = ROOT / "manifests"
NAME = "rayzero"
OVERLAYS = ("cpu-dev", "gpu", "spot")
_HEADER = (
    "# Generated from the chart by `python -m tests.deploy.manifests`; change the chart instead.\n"
)
_EXCLUDED = ("PrometheusRule", f"{NAME}-dashboard", f"{NAME}-test")
_HELM_METADATA = ("helm.sh/chart", "app.kubernetes.io/managed-by", "helm.sh/resource-policy")

Key = tuple[str, str]


def chart_objects(scenario: str) -> dict[Key, Object]:
    """The chart's objects without Helm's metadata, alerts and dashboard.

    Users of the Prometheus operator and Grafana apply the latter two from the chart's `files/`.
    """
    objects = {}
    for item in render(scenario_values(scenario), release=NAME, namespace=NAME):
        key = item["kind"], item["metadata"]["name"]
        if not set(key) & set(_EXCLUDED):
            objects[key] = item | {"metadata": _without_helm_metadata(item["metadata"])}
    return objects


def _without_helm_metadata(metadata: Object) -> Object:
    out = dict(metadata)
    for part in ("labels", "annotations"):
        values = {key: text for key, text in out.pop(part, {}).items() if key not in _HELM_METADATA}
        if values:
            out[part] = values
    return out


def manifest_texts() -> dict[str, str]:
    """The text of every manifest by its path."""
    base = chart_objects("default")
    out = _kustomize_folder("base", base, {})
    for name in OVERLAYS:
        out |= _overlay(name, base, chart_objects(name))
    return out


def _overlay(name: str, base: dict[Key, Object], target: dict[Key, Object]) -> dict[str, str]:
    """The files of an overlay that changes the objects of `base` to those of `target`."""
    folder = f"overlays/{name}"
    patches, texts = [], {}
    for key, item in base.items():
        kind, item_name = key
        selector = {"kind": kind, "name": item_name}
        if key not in target:
            delete = {
                "$patch": "delete",
                "apiVersion": item["apiVersion"],
                "kind": kind,
                "metadata": {"name": item_name},
            }
            patches.append({"target": selector, "patch": yaml.safe_dump(delete)})
        elif operations := list(_json_patch("", item, target[key])):
            file = f"{_file_stem(key)}.patch.yaml"
            patches.append({"target": selector, "path": file})
            texts[f"{folder}/{file}"] = _text(operations)
    added = {key: item for key, item in target.items() if key not in base}
    header = {"resources": ["../../base"], "patches": patches}
    return texts | _kustomize_folder(folder, added, header)


def _kustomize_folder(folder: str, objects: dict[Key, Object], header: Object) -> dict[str, str]:
    files = {f"{_file_stem(key)}.yaml": _text(item) for key, item in objects.items()}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [*header.get("resources", ()), *sorted(files)],
    }
    kustomization |= {"patches": header["patches"]} if header.get("patches") else {}
    texts = {f"{folder}/{name}": text for name, text in files.items()}
    return texts | {f"{folder}/kustomization.yaml": _text(kustomization)}


def _json_patch(path: str, old: Any, new: Any) -> Iterator[Object]:
    """JSON patch operations that change `old` to `new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            pointer = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
            if key not in new:
                yield {"op": "remove", "path": pointer}
            elif key not in old:
                yield {"op": "add", "path": pointer, "value": new[key]}
            else:
                yield from _json_patch(pointer, old[key], new[key])
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _json_patch(f"{path}/{index}", before, after)
    elif old != new:
        yield {"op": "replace", "path": path, "value": new}


def _file_stem(key: Key) -> str:
    kind, name = key
    suffix = name.removeprefix(NAME)
    return f"{kind.lower()}{suffix}"


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as literal blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_string)


def yaml_text(value: Any, width: int) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=width)


def _text(value: Any) -> str:
    return _HEADER + yaml_text(value, width=100)


def main() -> None:
    for folder in ("base", "overlays"):
        shutil.rmtree(MANIFESTS / folder, ignore_errors=True)
    for name, text in manifest_texts().items():
        path = MANIFESTS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
