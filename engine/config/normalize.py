"""Rewrites a document in place: booleans in place of sections, old names, "auto".

A file with "auto" was written for a trainer that fills in values from its arguments. Without one,
"auto" becomes that trainer's default, a value that follows from other keys, or the key's default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rayzero.engine.config.keys import Auto
from rayzero.engine.config.model import KEYS
from rayzero.engine.validation import repr_value

AUTO = "auto"
TOTAL_STEPS_PATH = "scheduler.params.total_num_steps"


def get_path(document: Mapping[str, Any], path: str) -> Any:
    """Returns the value at a dotted path, or None."""
    node: Any = document
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return node


def _set_path(document: dict[str, Any], path: str, value: Any) -> bool:
    """Sets the value at `path`; returns False if a parent is not a mapping."""
    *outer, last = path.split(".")
    node: Any = document
    for part in outer:
        node = node.setdefault(part, {}) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        return False
    node[last] = value
    return True


def _pop_path(document: dict[str, Any], path: str) -> Any:
    """Removes and returns the value at `path`; None if there is none."""
    outer, _, last = path.rpartition(".")
    parent = get_path(document, outer) if outer else document
    return parent.pop(last, None) if isinstance(parent, dict) else None


@dataclass(frozen=True)
class OldName:
    """An older path of a key. If the old key was a boolean, its true stands for the value `true` of
    the new key, and its false leaves the new key out."""

    old: str
    new: str
    true: str | None = None

    def convert(self, value: Any) -> Any:
        """Returns the new key's value; None leaves the key out. Raises ValueError for an invalid
        value."""
        if self.true is None:
            return value
        if value not in (True, False, None, AUTO):
            raise ValueError("true or false was expected")
        return self.true if value is True else None


OLD_NAMES = (
    OldName("bfloat16", "bf16"),
    *(OldName(old, key.path, key.old_true) for key in KEYS.values() for old in key.old_names),
)

_ON_OFF = ({"enabled": True}, {"enabled": False})
_CPU_NONE = ({"device": "cpu"}, {"device": "none"})

SHORTHANDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero_optimization": ({"stage": 1}, {"stage": 0}),
    "fp16": _ON_OFF,
    "bf16": _ON_OFF,
    "bfloat16": _ON_OFF,
    "torch_autocast": _ON_OFF,
    "zero_optimization.offload_optimizer": _CPU_NONE,
    "zero_optimization.offload_param": _CPU_NONE,
}
"""Sections that may be written as a boolean: (the section for true, the section for false)."""

_BOOLEAN = TypeAdapter(bool)
_TRANSFORMERS_DEFAULT = "the default of transformers' TrainingArguments"

AUTO_RULES: dict[str, Auto] = {
    **{path: key.auto for path, key in KEYS.items() if key.auto is not None},
    "optimizer.params.lr": Auto(5e-5, _TRANSFORMERS_DEFAULT),
    "optimizer.params.betas": Auto([0.9, 0.999], _TRANSFORMERS_DEFAULT),
    "optimizer.params.eps": Auto(1e-8, _TRANSFORMERS_DEFAULT),
    "optimizer.params.weight_decay": Auto(0.0, _TRANSFORMERS_DEFAULT),
    "scheduler.params.warmup_min_lr": Auto(0, "warm-up starts at 0"),
    "scheduler.params.warmup_max_lr": Auto(None, "optimizer.params.lr", "optimizer.params.lr"),
    "scheduler.params.warmup_num_steps": Auto(0, _TRANSFORMERS_DEFAULT),
}
"""The values of "auto" by path, in the order in which they are set: a rule may copy the result of
an earlier rule."""


def normalize(document: dict[str, Any], mistakes: list[str]) -> dict[str, str]:
    """Rewrites a document in place, and appends a line to `mistakes` for every value that cannot be
    used. Returns {path: how its value was written or derived}, also for keys that "auto" leaves
    out."""
    provenance: dict[str, str] = {}
    _expand_dotted(document, provenance)
    _expand_shorthands(document, provenance)
    for name in OLD_NAMES:
        _rename(document, name, provenance, mistakes)
    _resolve_auto(document, provenance, mistakes)
    if _is_true(get_path(document, "compile.deepcompile")):
        _set_path(document, "compile.enabled", True)
        provenance["compile.enabled"] = "compile.deepcompile: torch.compile without DeepCompile"
    return provenance


def _is_true(value: Any) -> bool:
    """Returns whether pydantic reads a value as the boolean true; the text "true" is such a value.
    Returns False for an invalid value, which the validation of its section reports."""
    try:
        return _BOOLEAN.validate_python(value)
    except ValidationError:
        return False


def fill_total_steps(document: dict[str, Any], steps: int | None) -> dict[str, Any]:
    """Sets the schedule's number of steps, if it is "auto", to `steps`, those of the job, in place.
    Returns the document."""
    if steps is not None and get_path(document, TOTAL_STEPS_PATH) == AUTO:
        _set_path(document, TOTAL_STEPS_PATH, steps)
    return document


def _expand_dotted(document: dict[str, Any], provenance: dict[str, str]) -> None:
    """Moves dotted keys of the top level, such as `"zero_optimization.stage": 2`, into their
    sections. A value that the section already has is kept: DeepSpeed reads only that value."""
    known = KEYS.keys() | {name.old for name in OLD_NAMES}
    for path in [key for key in document if "." in key and key in known]:
        value = document.pop(path)
        if get_path(document, path) in (None, AUTO) and _set_path(document, path, value):
            provenance[path] = f'the dotted key "{path}"'


def _expand_shorthands(document: dict[str, Any], provenance: dict[str, str]) -> None:
    for path, (true, false) in SHORTHANDS.items():
        value = get_path(document, path)
        if isinstance(value, bool):
            meaning = true if value else false
            _set_path(document, path, dict(meaning))
            provenance |= {f"{path}.{key}": f"{path}: {str(value).lower()}" for key in meaning}


def _rename(
    document: dict[str, Any], name: OldName, provenance: dict[str, str], mistakes: list[str]
) -> None:
    written = _pop_path(document, name.old)
    try:
        value = name.convert(written)
    except ValueError as error:
        mistakes.append(f"{name.old}: {error} (seen: {repr_value(written)})")
        return
    if value is None:
        return
    present = get_path(document, name.new)
    are_sections = isinstance(value, dict) and isinstance(present, dict)
    if are_sections and all(value[key] == present[key] for key in value.keys() & present.keys()):
        value = {**value, **present}
    elif present is not None and present != value:
        mistakes.append(
            f"{name.old}: is the old name of {name.new}, and the two disagree "
            f"({repr_value(written)} and {repr_value(present)})"
        )
        return
    if not _set_path(document, name.new, value):
        mistakes.append(
            f"{name.old}: is the old name of {name.new}, whose section is not a mapping"
        )
        return
    for path in [path for path in provenance if path.startswith(f"{name.old}.")]:
        del provenance[path]  # the path was renamed
    provenance |= dict.fromkeys(_leaf_paths(name.new, value), f"old name {name.old}")


def _leaf_paths(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaf_paths(f"{path}.{key}", inner)
    else:
        yield path


def _resolve_auto(
    document: dict[str, Any], provenance: dict[str, str], mistakes: list[str]
) -> None:
    if get_path(document, TOTAL_STEPS_PATH) == AUTO:
        _set_path(document, TOTAL_STEPS_PATH, 1)  # valid: "auto" is not reported a second time
        mistakes.append(
            f"{TOTAL_STEPS_PATH}: auto is the number of steps of a job (`steps:` in its job file), "
            "but there is no job; write the number (transformers and Accelerate fill it in)"
        )
    for path, rule in AUTO_RULES.items():
        if get_path(document, path) == AUTO:
            value = get_path(document, rule.copied_from) if rule.copied_from else rule.value
            if value is None:
                _pop_path(document, path)
            else:
                _set_path(document, path, value)
            provenance[path] = f"auto: {rule.reason}"
    _drop_remaining_auto(document, "", provenance)


def _drop_remaining_auto(section: dict[str, Any], prefix: str, provenance: dict[str, str]) -> None:
    for name, value in list(section.items()):
        if isinstance(value, dict):
            _drop_remaining_auto(value, f"{prefix}{name}.", provenance)
        elif value == AUTO:
            del section[name]
            provenance[prefix + name] = "auto: left out: the key's default"
