"""YAML + --set -> JobSpec; diff of two specs; MIN:MAX.

From a job file and `--set` to a checked JobSpec. Every mistake is a ConfigError.

What differs between two specs of one job, key by key, and which of it matters when. Pure.

How many workers somebody wants: `4`, `2:4`, (2, 4).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rayzero.engine.config import EngineConfig, read_config, resolve_batch_sizes
from rayzero.engine.config.auto import fill_total_steps
from rayzero.engine.config.parse import parse_with_provenance
from rayzero.engine.errors import ConfigError, first_line
from rayzero.engine.redact import REDACTED, is_secret_key, redact_url
from rayzero.engine.validation import validate_document
from rayzero.orchestrator.spec import JobSpec

_FLOAT_WITH_EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")


class _YamlLoader(yaml.SafeLoader):
    """YAML whose floats may be written 1e-4: PyYAML's own older rules make a string of that."""


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", _FLOAT_WITH_EXPONENT, list("-+.0123456789")
)


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
        _apply_override(document, override)
    return resolve_engine_config(
        validate_document(JobSpec, document, f"job file {str(path)!r}"), path.parent
    )


def resolve_engine_config(spec: JobSpec, engine_folder: Path) -> JobSpec:
    """The spec with its engine config read and checked for every size it may run in.

    Raises:
        ConfigError: the engine config cannot be read, is wrong, or would have another global batch
            at another number of workers.
    """
    if spec.engine is None:
        return spec
    source = engine_folder / spec.engine if isinstance(spec.engine, str) else spec.engine
    check_batch_sizes(
        parse_with_provenance(source, spec.steps).config, spec.workers.min, spec.workers.most
    )
    return spec.model_copy(update={"engine": fill_total_steps(read_config(source), spec.steps)})


def check_batch_sizes(config: EngineConfig, least: int, most: int) -> None:
    """Whether a job can run with any number of workers between these.

    Raises:
        ConfigError: the batch sizes do not work out, or the global batch would change.
    """
    totals = {resolve_batch_sizes(config, size).global_batch for size in range(least, most + 1)}
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
        document = yaml.load(text, _YamlLoader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"job file {str(path)!r} is not YAML: {_yaml_error_line(error)}"
        ) from None
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise ConfigError(
            f"job file {str(path)!r}: a mapping of keys to values was expected, not "
            f"{type(document).__name__}",
            allowed="lines such as `name: my-job` and `entrypoint: module:function`",
        )
    return document


def _yaml_error_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or first_line(error)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else str(problem)


def _apply_override(document: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not (equals and key):
        raise ConfigError(
            f"--set {override!r}: there is no '='", allowed="--set key=value", fix="--set"
        )
    try:
        value = yaml.load(text, _YamlLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r} is not YAML: {_yaml_error_line(error)}") from None
    *parents, last = key.split(".")
    here = document
    for parent in parents:
        inner = here.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is not a mapping in the job file")
        here = inner
    here[last] = value


LIVE_KEYS = ("workers.min", "workers.max")
"""What can be changed of a job while it runs."""


ADOPTABLE_KEYS = (
    "workers",
    "steps",
    "checkpoint.every_steps",
    "checkpoint.keep",
    "checkpoint.keep_every",
    "checkpoint.notice_s",
    "checkpoint.lease_s",
    "checkpoint.resume",
    "recovery",
    "metrics",
    "faults",
    "ledger",
    "engine.zero_optimization",
    "engine.train_micro_batch_size_per_gpu",
    "engine.gradient_accumulation_steps",
    "engine.activation_checkpointing",
    "engine.wall_clock_breakdown",
    "engine.steps_per_print",
)
"""What may be another when a lost run is gone on with, with all below it: where, how fast and how
safely it is trained. All the rest says what is trained: the same run cannot go on with it."""


@dataclass(frozen=True)
class SpecDiff:
    """One key. `ABSENT` stands for a key that one of the two has not. Its text tells no secret."""

    key: str
    old: str
    new: str

    def __str__(self) -> str:
        old, new = (self._redact_value(one) for one in (self.old, self.new))
        return f"{self.key}: {old} -> {new}"

    def _redact_value(self, value: str) -> str:
        secret = is_secret_key(self.key.rpartition(".")[2]) and value != ABSENT
        return REDACTED if secret else redact_url(value)


ABSENT = "(none)"


def to_document(spec: JobSpec) -> dict[str, Any]:
    """A spec as plain data, with all defaults."""
    found: dict[str, Any] = spec.model_dump(mode="json")
    found["workers"]["max"] = spec.workers.most  # what `None` stands for
    return found


def diff_documents(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[SpecDiff]:
    """Between two documents, by dotted key, sorted."""
    before, after = dict(_flatten_document("", old)), dict(_flatten_document("", new))
    return [
        SpecDiff(key, before.get(key, ABSENT), after.get(key, ABSENT))
        for key in sorted(before.keys() | after.keys())
        if before.get(key, ABSENT) != after.get(key, ABSENT)
    ]


def not_covered_by(found: Sequence[SpecDiff], allowed: Sequence[str]) -> list[SpecDiff]:
    """Those that are at none of the allowed keys, nor below one."""
    return [
        one
        for one in found
        if not any(one.key == key or one.key.startswith(key + ".") for key in allowed)
    ]


def _flatten_document(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Leaves by dotted key; an empty mapping is the same as none."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten_document(f"{prefix}.{key}" if prefix else str(key), inner)
    elif value is not None:
        yield prefix, json.dumps(value, sort_keys=True, default=str)


_WORKER_LIMITS_TEXT = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")


def parse_worker_limits(wanted: int | tuple[int, int] | str) -> tuple[int, int]:
    """The least and the most workers; a single number is both.

    Raises:
        ConfigError: it is something else, or the least is below 1 or above the most.
    """
    if isinstance(wanted, str):
        found = _WORKER_LIMITS_TEXT.fullmatch(wanted)
        pair = (int(found[1]), int(found[2] or found[1])) if found else None
    elif isinstance(wanted, int):
        pair = (wanted, wanted)
    else:
        pair = (int(wanted[0]), int(wanted[1]))
    if pair is None or not 1 <= pair[0] <= pair[1]:
        raise ConfigError(
            f"{wanted!r} is no number of workers",
            allowed="MIN:MAX with 1 <= MIN <= MAX, such as 2:8, or one number for both",
        )
    return pair
