"""Real DeepSpeed config files can be read, without unknown keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayzero.engine.config import parse_config
from rayzero.engine.errors import ConfigError

FILES = sorted((Path(__file__).parent / "files").iterdir())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_real_file_has_no_unknown_keys(path: Path) -> None:
    """Keys may be unsupported, but none is unknown or misread."""
    try:
        parse_config(path)
    except ConfigError as error:
        text = str(error)
        if "\n" not in text:
            text = text.partition("': ")[2]
        lines = [line.strip() for line in text.splitlines() if "mistakes:" not in line]
        known = ("refused: ", "that this", "two gradient compressions")
        unknown = [line for line in lines if not any(reason in line for reason in known)]
        assert unknown == []
