"""Which test runs each code block of README.md and docs, as data; some are checked here.

A bash line is run by the test that `BASH` names for the longest beginning that fits, or is not run,
for a stated reason. Text blocks are what commands print.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayzero.engine.config import parse_config
from rayzero.orchestrator.job_file import load_job
from tests.deploy.chart import render, render_scenario
from tests.house.source import ROOT

PAGES = ("README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md")))
PARSED = "tests/house/test_guides.py::test_commands_in_code_blocks_are_valid"
README = "tests/examples/test_readme.py"
FIRST = f"{README}::test_first_script_reproduces_documented_losses"
KILL = f"{README}::test_kill_of_the_first_job_is_repaired_as_shown"
QUICKSTART = "tests/integration/test_guide_sessions.py::test_quickstart_runs_as_written"
JOBS = "tests/integration/test_guide_sessions.py::test_jobs_in_python_run_as_written"
FIRST_JOB = (
    "tests/integration/test_guide_sessions.py::test_readmes_commands_of_a_job_run_as_written"
)
COMMANDS = "tests/integration/test_guide_sessions.py::test_guides_commands_of_a_job_run_as_written"
LAUNCHED = "tests/huggingface/test_launched_scripts.py"
HERE = "tests/house/test_blocks.py"
NOT_RUN = "not run: "
PYTHON = {
    "README.md": FIRST,
    "docs/quickstart.md": QUICKSTART,
    "docs/jobs.md": JOBS,
    "docs/checkpoints.md": f"{README}::test_checkpoint_blocks",
    "docs/faults.md": f"{README}::test_ledger_block",
    "docs/huggingface.md": f"{README}::test_accelerate_block",
    "docs/from-ray-train.md": JOBS,
}
BASH = {
    "README.md": {
        "rayzero": FIRST_JOB,
        "pip install": f"{NOT_RUN}tests/deploy/test_image.py installs by the same constraints",
        "rayzero launch": LAUNCHED,
        "torchrun --nproc-per-node 2 -m": "tests/huggingface/test_scripts.py",
        "make": f"{NOT_RUN}these are the demo and this suite, as CI starts them",
        "python first.py": FIRST,
        "torchrun --nproc-per-node 2 first.py": FIRST,
        "rayzero run job.yaml --set 'faults": KILL,
        "python -m rayzero.deepspeed": "tests/deepspeed/test_install.py",
        "torchrun --nproc-per-node 8": f"{NOT_RUN}needs 8 devices; with 2 in tests/huggingface",
        "kill -9": f"{NOT_RUN}the demo takes 80 s; test_kill_of_the_first_job is the same",
        "rayzero plan": f"{README}::test_plan_block",
        "helm": f"{HERE}::test_helm_and_kubectl_commands",
    },
    "docs/quickstart.md": {
        "": QUICKSTART,
        "python3.11": f"{NOT_RUN}Makefile's setup, as CI starts it",
        "pip install": f"{NOT_RUN}tests/deploy/test_image.py installs by the same constraints",
        "rayzero doctor": "tests/integration/test_doctor.py",
    },
    "docs/jobs.md": {
        "rayzero": COMMANDS,
        "rayzero resume": FIRST_JOB,
        "rayzero stop quick": QUICKSTART,
        "rayzero ls": JOBS,
        "rayzero status": JOBS,
        "rayzero scale": JOBS,
        "rayzero chaos": JOBS,
        "rayzero launch": LAUNCHED,
        "rayzero launch --workers 4 --autotuning": "tests/integration/test_command.py",
        "ray job": "tests/integration/test_end_to_end.py",
    },
    "docs/checkpoints.md": {"rayzero": f"{README}::test_checkpoint_blocks"},
    "docs/config.md": {"rayzero": f"{README}::test_config_block"},
    "docs/faults.md": {"rayzero": COMMANDS},
    "docs/huggingface.md": {
        "rayzero launch": LAUNCHED,
        "torchrun": "tests/huggingface/test_scripts.py",
        "python": "tests/huggingface/test_scripts.py",
    },
    "docs/kubernetes.md": {
        "kubectl": f"{HERE}::test_helm_and_kubectl_commands",
        "helm install": f"{HERE}::test_helm_and_kubectl_commands",
        "helm repo": f"{NOT_RUN}KubeRay's own chart, from the network",
        "helm install kuberay": f"{NOT_RUN}KubeRay's own chart, from the network",
        "helm test": f"{NOT_RUN}needs a cluster; tests/deploy/test_objects.py checks its pod",
        "docker": f"{NOT_RUN}needs docker; tests/deploy/test_image.py runs its commands",
        "export": f"{NOT_RUN}needs the secret of a cluster",
        "rayzero": COMMANDS,
    },
}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the name of the file that it is, if any."""

    language: str
    text: str
    file: str

    def lines(self) -> list[str]:
        """Its command lines, without comments."""
        joined = self.text.replace("\\\n", " ").splitlines()
        return [line for line in joined if line.strip() and not line.lstrip().startswith("#")]


BLOCK = re.compile(r"^(?P<indent> *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"`([\w.]+\.(?:py|json|yaml))`[^`]*:\s*$|`([\w.]+\.py)`\. It[^`]*:\s*$")


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        named = FILE.search(text[: match.start()])
        indent = len(match["indent"])
        lines = [line[indent:] for line in match[3].splitlines()]
        name = next(filter(None, named.groups()), "") if named else ""
        yield Block(match[2], "\n".join(lines) + "\n", name)


def where(page: str, line: str) -> str:
    """The test that runs a bash line, or why none does."""
    rows = BASH.get(page, {})
    fitting = [beginning for beginning in rows if line.strip().startswith(beginning)]
    return rows[max(fitting, key=len)] if fitting else ""


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
