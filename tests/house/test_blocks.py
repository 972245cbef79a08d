"""A test runs or checks each code block of README.md and docs; some kinds are checked here."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayzero.engine.config import parse_config
from rayzero.orchestrator.job_file import load_job
from tests.house.blocks import BASH, NOT_RUN, PAGES, PYTHON, Block, blocks, where
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
