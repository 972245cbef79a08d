"""Resolution of `"auto"`.

A file with "auto" was written for a trainer that fills in values from its arguments. Without one,
"auto" becomes that trainer's default, a value that follows from other keys, or the key's default.
Rules of keys that are fields are declared with them; those of free-form params are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rayzero.engine.config.key_table import KEYS
from rayzero.engine.config.normalize import get_path, pop_path, set_path

AUTO = "auto"


AutoFn = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class AutoRule:
    """The rule of one key.

    Attributes:
        resolve: maps the document, to which the rules before were applied, to the value; None
            leaves the key out.
        description: the rule as text, for messages and docs.
    """

    path: str
    resolve: AutoFn
    description: str


def _constant(value: Any) -> AutoFn:
    return lambda document: value


def _optimizer_lr(document: dict[str, Any]) -> Any:
    return get_path(document, "optimizer.params.lr")


_TRANSFORMERS_DEFAULT = "the default of transformers' TrainingArguments"


_PARAM_RULES = (
    AutoRule("optimizer.params.lr", _constant(5e-5), _TRANSFORMERS_DEFAULT),
    AutoRule("optimizer.params.betas", _constant([0.9, 0.999]), _TRANSFORMERS_DEFAULT),
    AutoRule("optimizer.params.eps", _constant(1e-8), _TRANSFORMERS_DEFAULT),
    AutoRule("optimizer.params.weight_decay", _constant(0.0), _TRANSFORMERS_DEFAULT),
    AutoRule("scheduler.params.warmup_min_lr", _constant(0), "warm-up starts at 0"),
    AutoRule("scheduler.params.warmup_max_lr", _optimizer_lr, "optimizer.params.lr"),
    AutoRule("scheduler.params.warmup_num_steps", _constant(0), _TRANSFORMERS_DEFAULT),
)


def _field_rules() -> Iterator[AutoRule]:
    for key in KEYS.values():
        if key.auto is not None:
            yield AutoRule(key.path, _constant(key.auto.value), key.auto.reason)


AUTO_RULES = (*_field_rules(), *_PARAM_RULES)
"""In the order of application: a rule may use the result of those before it."""

OTHER_KEYS_TEXT = "left out: the key's default"


TOTAL_STEPS_PATH = "scheduler.params.total_num_steps"


def resolve_auto(document: dict[str, Any], provenance: dict[str, str], mistakes: list[str]) -> None:
    """Replaces every "auto" in the document, in place.

    Args:
        provenance: gets {path: the rule that was applied}, for keys left out as well.
        mistakes: gets a line for every "auto" that cannot be resolved.
    """
    if get_path(document, TOTAL_STEPS_PATH) == AUTO:
        pop_path(document, TOTAL_STEPS_PATH)
        mistakes.append(
            f"{TOTAL_STEPS_PATH}: auto is the number of steps of a job (`steps:` in its job file), "
            "but this is no job; write the number"
        )
    for rule in AUTO_RULES:
        if get_path(document, rule.path) == AUTO:
            value = rule.resolve(document)
            if value is None:
                pop_path(document, rule.path)
            else:
                set_path(document, rule.path, value)
            provenance[rule.path] = f"auto: {rule.description}"
    _drop_remaining(document, "", provenance)


def fill_total_steps(document: dict[str, Any], steps: int | None) -> dict[str, Any]:
    """The document with a job's number of steps where the schedule's is "auto"."""
    section = document.get("scheduler")
    if (
        steps is None
        or get_path(document, TOTAL_STEPS_PATH) != AUTO
        or not isinstance(section, dict)
    ):
        return document
    return {
        **document,
        "scheduler": {**section, "params": {**section["params"], "total_num_steps": steps}},
    }


def _drop_remaining(section: dict[str, Any], prefix: str, provenance: dict[str, str]) -> None:
    """Leaves out every other "auto"."""
    for name, value in list(section.items()):
        if isinstance(value, dict):
            _drop_remaining(value, f"{prefix}{name}.", provenance)
        elif value == AUTO:
            del section[name]
            provenance[prefix + name] = f"auto: {OTHER_KEYS_TEXT}"
