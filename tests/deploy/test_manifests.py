"""Kustomize builds the manifests, and they are what the chart makes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import pods
from tests.deploy.manifests import MANIFESTS, NAME, OVERLAYS, files, objects
from tests.deploy.schemas import KUBERNETES, check, is_built_in

TARGETS = {"base": "default"} | {f"overlays/{name}": name for name in OVERLAYS}
WITH_TARGETS = pytest.mark.parametrize("target", TARGETS)


def build(folder: Path) -> list[dict]:
    """What kustomize makes of a folder."""
    for command in (["kustomize", "build"], ["kubectl", "kustomize"]):
        if shutil.which(command[0]):
            done = subprocess.run([*command, folder], capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            return [one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one]
    pytest.skip("needs kustomize or kubectl on the PATH")


def test_they_are_made_of_the_chart() -> None:
    there = {
        path.relative_to(MANIFESTS).as_posix(): path.read_text(encoding="utf-8")
        for path in MANIFESTS.rglob("*.yaml")
    }
    assert there == files(), "python -m tests.deploy.manifests writes them anew"


@WITH_TARGETS
def test_kustomize_makes_what_the_chart_makes(target: str) -> None:
    built = {(one["kind"], one["metadata"]["name"]): one for one in build(MANIFESTS / target)}
    assert built == objects(TARGETS[target])


@WITH_TARGETS
def test_they_are_valid(target: str) -> None:
    found = objects(TARGETS[target]).values()
    assert {one["metadata"]["namespace"] for one in found} == {NAME}
    for version in KUBERNETES:
        assert [text for one in found if is_built_in(one) for text in check(one, version)] == []


def test_the_users_own_overlay(tmp_path: Path) -> None:
    """Another namespace moves everything, the role binding's subject too; an image is set in one
    place, though it stands in four."""
    shutil.copytree(MANIFESTS, tmp_path / "manifests")
    own = tmp_path / "mine"
    own.mkdir()
    images = [{"name": "rayzero", "newName": "registry.example.com/rayzero", "newTag": "7"}]
    resources = ["../manifests/overlays/gpu"]
    text = yaml.safe_dump({"namespace": "mine", "resources": resources, "images": images})
    (own / "kustomization.yaml").write_text(text, encoding="utf-8")
    built = build(own)
    assert {one["metadata"]["namespace"] for one in built} == {"mine"}
    (binding,) = [one for one in built if one["kind"] == "RoleBinding"]
    assert [subject["namespace"] for subject in binding["subjects"]] == ["mine"]
    found = {one["image"] for pod in pods(built) for one in pod["spec"]["containers"]}
    assert found == {"registry.example.com/rayzero:7"}
