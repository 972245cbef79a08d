"""What `"auto"` becomes: one table.

A file with "auto" was written for a trainer that fills the values in from its own arguments. Here
there are none, so a value becomes what that trainer's default would have made of it, what follows
from other keys, or the key's own default.
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
    """What "auto" becomes at one key.

    Attributes:
        path: the key's.
        rule: from the document, whose rows above are done, to the value; None leaves the key out.
        says: the rule in words.
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


def resolve_auto(document: dict[str, Any], told: dict[str, str], mistakes: list[str]) -> None:
    """Puts a value in the place of every "auto"; the document is changed.

    Args:
        told: gets {path: what it became, and why}, for keys left out as well.
        mistakes: gets a line for what nobody can work out.
    """
    if get_path(document, TOTAL_STEPS_PATH) == AUTO:
        pop_path(document, TOTAL_STEPS_PATH)
        mistakes.append(
            f"{TOTAL_STEPS_PATH}: auto is the number of steps of a job (`steps:` in its job file), and "
            "there is no job here; write the number"
        )
    for one in AUTO_RULES:
        if get_path(document, one.path) == AUTO:
            value = one.resolve(document)
            if value is None:
                pop_path(document, one.path)
            else:
                set_path(document, one.path, value)
            told[one.path] = f"auto: {one.description}"
    _drop_remaining(document, "", told)


def fill_total_steps(document: dict[str, Any], steps: int | None) -> dict[str, Any]:
    """The document with a job's number of steps where a schedule asks for it by "auto"."""
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


def _drop_remaining(here: dict[str, Any], prefix: str, told: dict[str, str]) -> None:
    for name, value in list(here.items()):
        if isinstance(value, dict):
            _drop_remaining(value, f"{prefix}{name}.", told)
        elif value == AUTO:
            del here[name]
            told[prefix + name] = f"auto: {OTHER_KEYS_TEXT}"
