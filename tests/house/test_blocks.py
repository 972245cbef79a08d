"""A test runs or checks each code block of README.md and docs; some kinds are checked here."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayzero.engine.config import parse_config
from rayzero.orchestrator.job_file import load_job
from tests.deploy.chart import render, render_scenario
from tests.house.blocks import BASH, HERE, NOT_RUN, PAGES, PYTHON, Block, blocks, where
from tests.house.source import ROOT


def of_language(language: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{page}-{index}")
        for page in PAGES
        for index, block in enumerate(blocks(page))
        if block.language == language
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_its_test(page: str) -> None:
    for block in blocks(page):
        assert block.language in ("python", "yaml", "json", "bash", "text"), block
        if block.language == "python":
            ast.parse(block.text)
            assert page in PYTHON, block
        for line in block.lines() if block.language == "bash" else ():
            assert where(page, line), f"{page}: no test runs {line!r}"


def test_every_row_is_used_and_its_test_exists() -> None:
    lines = {
        page: [line for block in blocks(page) if block.language == "bash" for line in block.lines()]
        for page in BASH
    }
    for page, rows in BASH.items():
        for beginning, place in rows.items():
            assert any(line.strip().startswith(beginning) for line in lines[page]), (
                page,
                beginning,
            )
            assert place in {where(page, line) for line in lines[page]}, (page, beginning)
    for place in {place for rows in (*BASH.values(), PYTHON) for place in rows.values()}:
        path, _, name = place.removeprefix(NOT_RUN).partition("::")
        assert place.startswith(NOT_RUN) or (ROOT / path).exists(), place
        assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), place


ENGINE = {"train_batch_size": 8, "optimizer": {"type": "Adam"}}
JOB = {"name": "a", "entrypoint": "train:train", "engine": ENGINE}


@pytest.mark.parametrize("block", of_language("yaml"))
def test_yaml_is_a_job_file_or_part_of_one(block: Block, tmp_path: Path) -> None:
    document = yaml.safe_load(block.text)
    whole = document if "name" in document else JOB | document
    (tmp_path / "ds_config.json").write_text(json.dumps(ENGINE))
    (tmp_path / "train.py").touch()
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(whole))
    assert load_job(path).name == whole["name"]


@pytest.mark.parametrize("block", of_language("json"))
def test_json_is_an_engine_config(block: Block) -> None:
    parse_config(without_auto(json.loads(block.text)))


def without_auto(document: Any) -> Any:
    """Without what Trainer fills in."""
    if not isinstance(document, dict):
        return document
    return {key: without_auto(value) for key, value in document.items() if value != "auto"}


HELM = argparse.ArgumentParser(exit_on_error=False)
HELM.add_argument("verb", choices=["install"])
HELM.add_argument("release")
HELM.add_argument("chart")
HELM.add_argument("-f", dest="files", action="append", default=[])
HELM.add_argument("--set", dest="values", action="append", default=[])
HELM.add_argument("-n", dest="namespace", default="default")


def helm_objects(line: str) -> list[Any]:
    """What `helm install` of the line makes, its values checked by the chart's schema."""
    words = HELM.parse_args(shlex.split(line, comments=True)[1:])
    assert words.chart == "helm/rayzero"
    values: dict[str, Any] = {}
    for file in words.files:
        values |= yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
    for setting in ",".join(words.values).split(",") if words.values else ():
        path, _, value = setting.partition("=")
        section = values
        *parents, last = path.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    assert values["image"]["repository"]
    return render(values, words.release, words.namespace)


@pytest.mark.parametrize("page", ["README.md", "docs/kubernetes.md"])
def test_helm_and_kubectl_commands(page: str) -> None:
    """helm's are rendered; what kubectl's name is in what they render."""
    place = f"{HERE}::test_helm_and_kubectl_commands"
    found = [block for block in blocks(page) if block.language == "bash"]
    lines = [
        line.strip() for block in found for line in block.lines() if where(page, line) == place
    ]
    objects = [item for line in lines if line.startswith("helm") for item in helm_objects(line)]
    objects += render_scenario("s3")  # whose secret the guide creates
    text = yaml.safe_dump(objects)
    ended = {"RayCluster", "RayJob"} & {item["kind"] for item in objects}
    assert ended, lines
    for line in (line for line in lines if line.startswith("kubectl")):
        for service in re.findall(r"svc/(\S+)-head-svc", line):
            assert service in {item["metadata"]["name"] for item in objects}, line
        for secret in re.findall(r"create secret generic (\S+) ", line):
            assert secret in text, line
        for port in re.findall(r"port-forward \S+ (\d+) ", line):
            assert f"containerPort: {port}" in text, line
