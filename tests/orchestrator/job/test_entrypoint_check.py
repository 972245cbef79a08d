"""A mistake in `entrypoint` is found in the source, without an import."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayzero.orchestrator.job.entrypoint_check import check_entrypoint
from rayzero.workers.entrypoint import EntryPointError

SOURCE = """
raise RuntimeError("imported")
from typing import Protocol as Shape
import os.path
if True:
    def train(ctx): ...
else:
    from somewhere import train_slowly
for name in ("a", "b"):
    globals_of_mine = {}
class Trainer:
    @staticmethod
    def run(ctx): ...
evaluate, other = 1, 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "gpt.py").write_text(SOURCE)
    (tmp_path / "dynamic.py").write_text("globals()['train'] = print")
    (tmp_path / "star.py").write_text("from jobs.gpt import *")
    (tmp_path / "broken.py").write_text("def train(ctx:")
    return str(tmp_path)


@pytest.mark.parametrize("name", ["train", "train_slowly", "Trainer.run", "evaluate", "Shape"])
def test_defined_names_are_accepted(folder: str, name: str):
    check_entrypoint(f"jobs.gpt:{name}", folder, only_here=True)


@pytest.mark.parametrize("module", ["dynamic", "star", "broken", "json", "rayzero.cli_of_mine"])
def test_what_the_source_does_not_tell_is_left_to_the_workers(folder: str, module: str):
    check_entrypoint(f"{module}:train", folder, only_here=True)


def test_misspelt_function_is_found(folder: str):
    with pytest.raises(EntryPointError, match=r"'trian' is not in .*gpt.py.*did you mean 'train'"):
        check_entrypoint("jobs.gpt:trian", folder, only_here=False)


def test_missing_module_is_found_on_the_machine_of_the_workers(folder: str):
    with pytest.raises(EntryPointError, match="no module named 'jbos'"):
        check_entrypoint("jbos.gpt:train", folder, only_here=True)
    check_entrypoint("jbos.gpt:train", folder, only_here=False)
