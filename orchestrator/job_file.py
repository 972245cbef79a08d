"""Loads job files, with overrides, into a `JobSpec`; compares specs; parses numbers of workers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from rayzero.engine.config import EngineConfig, read_config
from rayzero.engine.config.normalize import fill_total_steps
from rayzero.engine.config.parse import parse_with_provenance, read_text, to_plain
from rayzero.engine.data.batch_sizes import first_refused_size, resolve_batch_sizes
from rayzero.engine.errors import ConfigError, first_line
from rayzero.engine.redact import REDACTED, is_secret_key, redact_url
from rayzero.engine.validation import repr_value, validate_document
from rayzero.orchestrator.rollout_plan import plan_rollouts
from rayzero.orchestrator.spec import MAX_WORKERS, JobSpec
from rayzero.orchestrator.yaml_document import MAX_DEPTH, parse_yaml
from rayzero.workers.chaos.spec import parse_fault, why_no_such_worker


def load_job(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Reads and validates a job file, with its engine config inline. Raises ConfigError if a file
    is missing or is not YAML, or a key or a value is wrong.

    Args:
        path: a YAML file.
        overrides: `key=value` with a dotted key and a YAML value. They take precedence over the
            file and its engine config: `engine.zero_optimization.stage=3`.
    """
    name = f"job file {str(path)!r:.300}"
    if path.suffix == ".py":
        raise ConfigError(
            f"{name} is a Python script",
            allowed="a YAML file with `name:` and `entrypoint:`",
            fix=f"`rayzero launch {path!s:.300}` runs the script itself",
        )
    return make_spec(_read_yaml(path, name), name, path.parent, overrides)


def make_spec(
    document: dict[str, Any], name: str, folder: Path, overrides: Sequence[str]
) -> JobSpec:
    """Validates the contents of a job file as `load_job` does. `name` is for errors; the path of an
    engine config is relative to `folder`."""
    if isinstance(document.get("engine"), str):
        document["engine"] = read_config(folder / document["engine"])
    for override in overrides:
        _apply_override(document, override)
    return resolve_engine_config(validate_document(JobSpec, document, name), folder)


def resolve_engine_config(spec: JobSpec, engine_folder: Path) -> JobSpec:
    """Returns the spec with its engine config inline, validated for every world size of the job.
    Raises ConfigError if the engine config cannot be read or is invalid, or its global batch would
    change with the number of workers."""
    _check_args(spec)
    most = {name: role.workers.most for name, role in spec.roles.items()}
    for fault in spec.faults:
        if why := why_no_such_worker(parse_fault(fault), most):
            raise ConfigError(f"fault {fault!r}: {why}", fix="`faults` or `roles` in the job file")
    if spec.engine is None:
        plan_rollouts(spec)
        return spec
    source = engine_folder / spec.engine if isinstance(spec.engine, str) else spec.engine
    check_batch_sizes(
        parse_with_provenance(source, spec.steps).config, spec.workers.min, spec.workers.most
    )
    engine = fill_total_steps(read_config(source), spec.steps)
    resolved = spec.model_copy(update={"engine": engine})
    plan_rollouts(resolved)
    return resolved


def _check_args(spec: JobSpec) -> None:
    """Raises ConfigError unless the args can be stored in a journal, which is JSON."""
    all_args = {"args": spec.args}
    all_args |= {f"roles.{name}.args": role.args for name, role in spec.roles.items()}
    for key, args in all_args.items():
        name = f"job {spec.name!r}, {key}"
        try:
            to_plain(to_jsonable_python(args), name, MAX_DEPTH, allow_infinity=False)
        except ConfigError:
            raise
        except ValueError as error:  # no JSON type, or a cycle
            raise ConfigError(f"{name}: {first_line(error)}", allowed="JSON types") from None


def check_batch_sizes(config: EngineConfig, min_workers: int, max_workers: int) -> None:
    """Checks that the global batch is the same for every number of workers. Raises ConfigError if
    the batch sizes are inconsistent, or the global batch would change or has less than one sample
    for each worker."""
    total, sizes = config.train_batch_size, (min_workers, max_workers)
    if total is None and min_workers < max_workers:
        least, most = (resolve_batch_sizes(config, size).global_batch for size in sizes)
        raise ConfigError(
            f"with {min_workers} to {max_workers} workers the global batch would vary from "
            f"{least} to {most} samples, because train_batch_size is not set",
            allowed="a global batch that does not depend on the number of workers",
            fix="set train_batch_size in the engine config, or make workers.min and workers.max "
            "equal",
        )
    if total is not None and total < max_workers:
        raise ConfigError(
            f"train_batch_size {total} is enough for {total} workers at most, with a sample each, "
            f"but workers.max is {max_workers}",
            allowed=f"workers.max from 1 to {total}",
            fix="workers.max in the job file, or train_batch_size in the engine config",
        )
    resolve_batch_sizes(config, first_refused_size(config, min_workers, max_workers))


def _read_yaml(path: Path, name: str) -> dict[str, Any]:
    document = parse_yaml(read_text(path, name, "the path given to `rayzero run`"), name)
    if not isinstance(document, dict):
        raise ConfigError(
            f"{name}: a mapping of keys to values was expected, not {type(document).__name__}",
            allowed="lines such as `name: my-job` and `entrypoint: module:function`",
        )
    return document


def _apply_override(document: dict[str, Any], override: str) -> None:
    to_plain(override, "--set")
    key, equals, text = override.partition("=")
    if not (equals and key):
        raise ConfigError(f"--set {override!r} has no '='", allowed="--set key=value", fix="--set")
    value = parse_yaml(text, f"--set {override!a:.200}")
    *parents, last = key.split(".")
    section = document
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is not a mapping in the job file")
    section[last] = value


LIVE_KEYS = ("workers.min", "workers.max", "roles.*.workers.min", "roles.*.workers.max")
"""Keys that can be changed while a job runs."""
ADOPTABLE_KEYS = (
    "workers",
    "roles.*.workers",
    "roles.*.recovery",
    "rollouts.max_version_lag",
    "rollouts.max_bytes",
    "steps",
    "checkpoint.every_steps",
    "checkpoint.keep",
    "checkpoint.keep_every",
    "checkpoint.grace_period_s",
    "checkpoint.notice_s",  # its old name, in older journals
    "checkpoint.lease_s",
    "checkpoint.resume",
    "recovery",
    "health",
    "metrics",
    "records",
    "faults",
    "ledger",
    "engine.zero_optimization",
    "engine.train_micro_batch_size_per_gpu",
    "engine.gradient_accumulation_steps",
    "engine.activation_checkpointing",
    "engine.wall_clock_breakdown",
    "engine.steps_per_print",
)
"""Keys, with all below them, that may differ when a lost run is adopted: they determine where, how
fast and how safely it trains. All others determine what is trained, which cannot change within a
run.
"""


def to_document(spec: JobSpec) -> dict[str, Any]:
    """Returns a spec as JSON data, with all defaults filled in."""
    document: dict[str, Any] = spec.model_dump(mode="json")
    document["workers"]["max"] = spec.workers.most
    for name, role in spec.roles.items():
        document["roles"][name]["workers"]["max"] = role.workers.most
    return document


def diff_documents(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Returns the keys (dotted, sorted) whose values differ in two documents, each with a line
    `key: old -> new`, in which secrets are redacted."""
    before, after = _leaf_texts(old), _leaf_texts(new)
    return {
        key: f"{key}: {_show_value(key, before)} -> {_show_value(key, after)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }


def not_covered_by(diffs: Mapping[str, str], allowed: Sequence[str]) -> list[str]:
    """Returns the lines of `diff_documents` whose key is neither one of the allowed keys nor below
    one."""
    return [
        line
        for key, line in diffs.items()
        if not any(fnmatchcase(f"{key}.", f"{covered}.*") for covered in allowed)
    ]


def _show_value(key: str, leaves: Mapping[str, str]) -> str:
    if key not in leaves:
        return "(none)"
    return REDACTED if is_secret_key(key.rpartition(".")[2]) else redact_url(leaves[key])


def flatten_document(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of every leaf. None and empty mappings are left out."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten_document(inner, f"{prefix}.{key}" if prefix else str(key))
    elif value is not None:
        yield prefix, value


def _leaf_texts(document: Mapping[str, Any]) -> dict[str, str]:
    """Returns the JSON text of each leaf, by dotted key."""
    leaves = flatten_document(document)
    return {key: json.dumps(value, sort_keys=True, default=str) for key, value in leaves}


_WORKER_LIMITS_TEXT = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")


def parse_worker_limits(limits: int | tuple[int, int] | str) -> tuple[int, int]:
    """Returns (minimum, maximum) for `4`, `"2:4"` or `(2, 4)`; a single number is both. Raises
    ConfigError for anything else, or unless 1 <= minimum <= maximum."""
    pair = None
    if isinstance(limits, str):
        if match := _WORKER_LIMITS_TEXT.fullmatch(limits):
            pair = (int(match[1]), int(match[2] or match[1]))
    else:
        with suppress(TypeError, ValueError, OverflowError):  # from a script
            least, most = (limits, limits) if isinstance(limits, int) else limits
            pair = (int(least), int(most))
    if pair is None or not 1 <= pair[0] <= pair[1] <= MAX_WORKERS:
        raise ConfigError(
            f"{repr_value(limits)} is not a number of workers",
            allowed=f"MIN:MAX with 1 <= MIN <= MAX <= {MAX_WORKERS}, such as 2:8, or one number "
            "for both",
        )
    return pair
