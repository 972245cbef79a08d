"""From a job file and `--set` to a checked JobSpec. Every mistake is a ConfigError."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rayzero.engine.config import EngineConfig, read_config, solve_batches
from rayzero.engine.config.autos import with_steps
from rayzero.engine.config.parse import parse
from rayzero.engine.errors import ConfigError, first_line
from rayzero.engine.validation import validated
from rayzero.orchestrator.spec import JobSpec

_EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """YAML whose floats may be written 1e-4: PyYAML's own older rules make a string of that."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def load_job(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Reads and checks a job file; the engine config comes back inline.

    Args:
        path: a YAML file.
        overrides: `key=value` with a dotted key and a YAML value; they win over the file, and
            reach into the engine config too: `engine.zero_optimization.stage=3`.

    Raises:
        ConfigError: a file is missing or is not YAML, or a key or a value is wrong.
    """
    document = _read_yaml(path)
    if isinstance(document.get("engine"), str):
        document["engine"] = read_config(path.parent / document["engine"])
    for override in overrides:
        _override(document, override)
    return check(validated(JobSpec, document, f"job file {str(path)!r}"), path.parent)


def check(spec: JobSpec, engine_folder: Path) -> JobSpec:
    """The spec with its engine config read and checked for every size it may run in.

    Raises:
        ConfigError: the engine config cannot be read, is wrong, or would have another global batch
            at another number of workers.
    """
    if spec.engine is None:
        return spec
    source = engine_folder / spec.engine if isinstance(spec.engine, str) else spec.engine
    check_sizes(parse(source, spec.steps).config, spec.workers.min, spec.workers.most)
    return spec.model_copy(update={"engine": with_steps(read_config(source), spec.steps)})


def check_sizes(config: EngineConfig, least: int, most: int) -> None:
    """Whether a job can run with any number of workers between these.

    Raises:
        ConfigError: the batch sizes do not work out, or the global batch would change.
    """
    totals = {solve_batches(config, size).global_batch for size in range(least, most + 1)}
    if len(totals) > 1:
        raise ConfigError(
            f"with {least} to {most} workers the global batch would be anything from "
            f"{min(totals)} to {max(totals)} samples, because train_batch_size is not given",
            allowed="a global batch that does not depend on how many workers there are",
            fix="train_batch_size in the engine config, or the same workers.min and workers.max",
        )


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"job file {str(path)!r} cannot be read: {reason}",
            fix="the path given to `rayzero run`",
        ) from None
    try:
        document = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"job file {str(path)!r} is not YAML: {_one_line(error)}") from None
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise ConfigError(
            f"job file {str(path)!r}: a mapping of keys to values was expected, not "
            f"{type(document).__name__}",
            allowed="lines such as `name: my-job` and `entrypoint: module:function`",
        )
    return document


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or first_line(error)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else str(problem)


def _override(document: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not (equals and key):
        raise ConfigError(
            f"--set {override!r}: there is no '='", allowed="--set key=value", fix="--set"
        )
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r} is not YAML: {_one_line(error)}") from None
    *parents, last = key.split(".")
    here = document
    for parent in parents:
        inner = here.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is not a mapping in the job file")
        here = inner
    here[last] = value
