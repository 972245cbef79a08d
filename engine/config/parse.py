"""From what a user gave to a checked config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayzero.engine.config.document import EngineConfig
from rayzero.engine.config.reading import read_config
from rayzero.engine.config.refusal import refusals
from rayzero.engine.errors import ConfigError
from rayzero.engine.validation import validated


def parse_config(source: str | Path | dict[str, Any] | EngineConfig | None) -> EngineConfig:
    """A checked config from whatever the user gave; None is the config with every default.

    Raises:
        ConfigError: naming every wrong key.
    """
    if source is None:
        return EngineConfig()
    if isinstance(source, EngineConfig):
        return source
    what = "engine config" if isinstance(source, dict) else f"engine config {str(source)!r}"
    config = validated(EngineConfig, read_config(source), what)
    if lines := list(refusals(config)):
        count = f"{len(lines)} mistakes:\n  " if len(lines) > 1 else ""
        raise ConfigError(f"{what}: {count}" + "\n  ".join(lines))
    return config
