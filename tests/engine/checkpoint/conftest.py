"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.engine.checkpoint import make_deepspeed


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with DeepSpeed's checkpoints."""
    folder = tmp_path_factory.mktemp("deepspeed")
    with zipfile.ZipFile(make_deepspeed.ARCHIVE) as archive:
        archive.extractall(folder)
    return folder
