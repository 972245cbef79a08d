"""From what a user gave to a checked config, and to where each of its values came from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from rayzero.engine.config.autos import resolve, with_steps
from rayzero.engine.config.document import EngineConfig
from rayzero.engine.config.old_names import lengthen, rename
from rayzero.engine.config.optim import params_mistakes
from rayzero.engine.config.reading import describe, read_config
from rayzero.engine.config.sift import refusals, sift
from rayzero.engine.config.together import clashes
from rayzero.engine.validation import check, refuse

Source = str | os.PathLike[str] | Mapping[str, Any] | EngineConfig


@dataclass(frozen=True)
class Parsed:
    """A checked config, and how it came to be.

    Attributes:
        config: checked, whole.
        document: what was given, under the names of today; keys that became nothing are gone.
        told: {path: how its value came to be}, for keys that were not simply given: by "auto", an
            old name, a boolean in place of a section.
    """

    config: EngineConfig
    document: Mapping[str, Any] = field(default_factory=dict)
    told: Mapping[str, str] = field(default_factory=dict)


def parse_config(source: Source | None) -> EngineConfig:
    """A checked config from whatever the user gave; None is the config with every default.

    Raises:
        ConfigError: naming every wrong key.
    """
    return source if isinstance(source, EngineConfig) else parse(source).config


def parse(source: Source | None, steps: int | None = None) -> Parsed:
    """As `parse_config`, with how each value came to be.

    Args:
        steps: of the job, if there is one and it says.

    Raises:
        ConfigError: naming every wrong key.
    """
    if source is None:
        return Parsed(EngineConfig())
    if isinstance(source, EngineConfig):
        if found := list(clashes(source)):
            refuse(describe(source), found)
        return Parsed(source, source.model_dump(mode="json", exclude_unset=True))
    document, mistakes = deepcopy(with_steps(read_config(source), steps)), list[str]()
    told = lengthen(document)
    rename(document, told, mistakes)
    resolve(document, told, mistakes)
    config, wrong = check(EngineConfig, sift(document, mistakes))
    mistakes += wrong
    if config is not None:
        mistakes += [*refusals(config), *clashes(config)]
        mistakes += params_mistakes(config.optimizer, config.scheduler)
    if mistakes or config is None:
        refuse(describe(source), mistakes)
    return Parsed(config, document, told)
