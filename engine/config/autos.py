"""What `"auto"` becomes: one table.

A file with "auto" was written for a trainer that fills the values in from its own arguments. Here
there are none, so a value becomes what that trainer's default would have made of it, what follows
from other keys, or the key's own default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rayzero.engine.config.paths import find, put, take

AUTO = "auto"
Rule = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class Auto:
    """What "auto" becomes at one key.

    Attributes:
        path: the key's.
        rule: from the document, whose rows above are done, to the value; None leaves the key out.
        says: the rule in words.
    """

    path: str
    rule: Rule
    says: str


def _is(value: Any) -> Rule:
    return lambda document: value


def _left_out(document: dict[str, Any]) -> None:
    """The key's default, or what is worked out later, takes its place."""


def _lr(document: dict[str, Any]) -> Any:
    return find(document, "optimizer.params.lr")


_TRANSFORMERS = "the default of transformers' TrainingArguments"
_BATCH = "left out: worked out from the other two batch sizes"
AUTOS = (
    Auto("train_batch_size", _left_out, _BATCH),
    Auto("train_micro_batch_size_per_gpu", _left_out, f"{_BATCH}; 1 without them"),
    Auto("gradient_accumulation_steps", _left_out, f"{_BATCH}; 1 without them"),
    Auto("gradient_clipping", _is(1.0), _TRANSFORMERS),
    Auto("fp16.enabled", _is(False), f"{_TRANSFORMERS}; say true to train in fp16"),
    Auto("bf16.enabled", _is(False), f"{_TRANSFORMERS}; say true to train in bf16"),
    Auto("optimizer.params.lr", _is(5e-5), _TRANSFORMERS),
    Auto("optimizer.params.betas", _is([0.9, 0.999]), _TRANSFORMERS),
    Auto("optimizer.params.eps", _is(1e-8), _TRANSFORMERS),
    Auto("optimizer.params.weight_decay", _is(0.0), _TRANSFORMERS),
    Auto("scheduler.params.warmup_min_lr", _is(0), "warm-up begins at 0"),
    Auto("scheduler.params.warmup_max_lr", _lr, "optimizer.params.lr"),
    Auto("scheduler.params.warmup_num_steps", _is(0), _TRANSFORMERS),
)
ANY_OTHER = "left out: the key's default"
TOTAL_STEPS = "scheduler.params.total_num_steps"


def resolve(document: dict[str, Any], told: dict[str, str], mistakes: list[str]) -> None:
    """Puts a value in the place of every "auto"; the document is changed.

    Args:
        told: gets {path: what it became, and why}, for keys left out as well.
        mistakes: gets a line for what nobody can work out.
    """
    if find(document, TOTAL_STEPS) == AUTO:
        take(document, TOTAL_STEPS)
        mistakes.append(
            f"{TOTAL_STEPS}: auto is the number of steps of a job (`steps:` in its job file), and "
            "there is no job here; write the number"
        )
    for one in AUTOS:
        if find(document, one.path) == AUTO:
            value = one.rule(document)
            if value is None:
                take(document, one.path)
            else:
                put(document, one.path, value)
            told[one.path] = f"auto: {one.says}"
    _drop_others(document, "", told)


def with_steps(document: dict[str, Any], steps: int | None) -> dict[str, Any]:
    """The document with a job's number of steps where a schedule asks for it by "auto"."""
    section = document.get("scheduler")
    if steps is None or find(document, TOTAL_STEPS) != AUTO or not isinstance(section, dict):
        return document
    return {
        **document,
        "scheduler": {**section, "params": {**section["params"], "total_num_steps": steps}},
    }


def _drop_others(here: dict[str, Any], prefix: str, told: dict[str, str]) -> None:
    for name, value in list(here.items()):
        if isinstance(value, dict):
            _drop_others(value, f"{prefix}{name}.", told)
        elif value == AUTO:
            del here[name]
            told[prefix + name] = f"auto: {ANY_OTHER}"
