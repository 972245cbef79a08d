"""The manifests, made of the chart: a base, and what the overlays change in it.

`python -m tests.deploy.manifests` writes them anew.
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
_HEAD = "# Made of the chart by `python -m tests.deploy.manifests`; change the chart instead.\n"
_LEFT_OUT = ("PrometheusRule", f"{NAME}-dashboard", f"{NAME}-test")
_OF_HELM = ("helm.sh/chart", "app.kubernetes.io/managed-by", "helm.sh/resource-policy")

Key = tuple[str, str]


def objects(scenario: str) -> dict[Key, Object]:
    """What the chart makes, without what belongs to Helm, and without alerts and dashboard: who has
    the Prometheus operator and Grafana applies them from the chart's `files/`."""
    found = {}
    for one in render(scenario_values(scenario), release=NAME, namespace=NAME):
        key = one["kind"], one["metadata"]["name"]
        if not set(key) & set(_LEFT_OUT):
            found[key] = one | {"metadata": _without_helm(one["metadata"])}
    return found


def _without_helm(metadata: Object) -> Object:
    out = dict(metadata)
    for part in ("labels", "annotations"):
        kept = {key: value for key, value in out.pop(part, {}).items() if key not in _OF_HELM}
        if kept:
            out[part] = kept
    return out


def files() -> dict[str, str]:
    """The text of every manifest by its path."""
    base = objects("default")
    out = _folder("base", base, {})
    for name in OVERLAYS:
        out |= _overlay(name, base, objects(name))
    return out


def _overlay(name: str, base: dict[Key, Object], wanted: dict[Key, Object]) -> dict[str, str]:
    folder = f"overlays/{name}"
    patches, texts = [], {}
    for key, one in base.items():
        kind, called = key
        target = {"kind": kind, "name": called}
        if key not in wanted:
            gone = {"apiVersion": one["apiVersion"], "kind": kind, "metadata": {"name": called}}
            patches.append({"target": target, "patch": yaml.safe_dump({"$patch": "delete"} | gone)})
        elif changes := list(_changes("", one, wanted[key])):
            file = f"{_file(key)}.patch.yaml"
            patches.append({"target": target, "path": file})
            texts[f"{folder}/{file}"] = _text(changes)
    more = {key: one for key, one in wanted.items() if key not in base}
    head = {"resources": ["../../base"], "patches": patches}
    return texts | _folder(folder, more, head)


def _folder(folder: str, found: dict[Key, Object], head: Object) -> dict[str, str]:
    own = {f"{_file(key)}.yaml": _text(one) for key, one in found.items()}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [*head.get("resources", ()), *sorted(own)],
    }
    kustomization |= {"patches": head["patches"]} if head.get("patches") else {}
    texts = {f"{folder}/{name}": text for name, text in own.items()}
    return texts | {f"{folder}/kustomization.yaml": _text(kustomization)}


def _changes(path: str, old: Any, new: Any) -> Iterator[Object]:
    """The steps of a JSON patch from one value to the other."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            inner = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
            if key not in new:
                yield {"op": "remove", "path": inner}
            elif key not in old:
                yield {"op": "add", "path": inner, "value": new[key]}
            else:
                yield from _changes(inner, old[key], new[key])
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _changes(f"{path}/{index}", before, after)
    elif old != new:
        yield {"op": "replace", "path": path, "value": new}


def _file(key: Key) -> str:
    kind, name = key
    rest = name.removeprefix(NAME)
    return f"{kind.lower()}{rest}"


class _Dumper(yaml.SafeDumper):
    """Long texts as blocks, as people write them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _string)


def _text(value: Any) -> str:
    return _HEAD + yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=100)


def main() -> None:
    for folder in ("base", "overlays"):
        shutil.rmtree(MANIFESTS / folder, ignore_errors=True)
    for name, text in files().items():
        path = MANIFESTS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
