"""The manifests are up to date, and kustomize builds the objects of the chart, which
`test_scenarios.py` validates.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import objects_of_kind, pods
from tests.deploy.manifests import MANIFESTS, NAME, OVERLAYS, chart_objects, manifest_texts

TARGETS = {"base": "default"} | {f"overlays/{name}": name for name in OVERLAYS}


def build(folder: Path) -> list[dict]:
    """The objects that kustomize builds from a folder."""
    for command in (["kustomize", "build"], ["kubectl", "kustomize"]):
        if shutil.which(command[0]):
            done = subprocess.run([*command, folder], capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            return [item for item in yaml.load_all(done.stdout, yaml.CSafeLoader) if item]
    pytest.skip("needs kustomize or kubectl on the PATH")


def test_manifests_are_up_to_date() -> None:
    texts = {
        path.relative_to(MANIFESTS).as_posix(): path.read_text(encoding="utf-8")
        for path in MANIFESTS.rglob("*.yaml")
    }
    assert texts == manifest_texts(), "run python -m tests.deploy.manifests to update them"


@pytest.mark.parametrize("target", TARGETS)
def test_kustomize_builds_chart_objects(target: str) -> None:
    objects = {(item["kind"], item["metadata"]["name"]): item for item in build(MANIFESTS / target)}
    assert objects == chart_objects(TARGETS[target])
    assert {item["metadata"]["namespace"] for item in objects.values()} == {NAME}


def test_user_overlay_sets_namespace_and_image(tmp_path: Path) -> None:
    """The namespace also applies to the role binding's subject, and the image to all containers."""
    shutil.copytree(MANIFESTS, tmp_path / "manifests")
    overlay = tmp_path / "mine"
    overlay.mkdir()
    images = [{"name": "rayzero", "newName": "registry.example.com/rayzero", "newTag": "7"}]
    resources = ["../manifests/overlays/gpu"]
    text = yaml.safe_dump({"namespace": "mine", "resources": resources, "images": images})
    (overlay / "kustomization.yaml").write_text(text, encoding="utf-8")
    objects = build(overlay)
    assert {item["metadata"]["namespace"] for item in objects} == {"mine"}
    (binding,) = objects_of_kind(objects, "RoleBinding")
    assert [subject["namespace"] for subject in binding["subjects"]] == ["mine"]
    containers = [container for pod in pods(objects) for container in pod["spec"]["containers"]]
    assert {container["image"] for container in containers} == {"registry.example.com/rayzero:7"}
