"""The sections `optimizer` and `scheduler`. What their params mean is told in `engine/optim`."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, create_model

from rayzero.engine.config.fields import Section, number, one_of
from rayzero.engine.config.optimizers import OPTIMIZER_PARAMS, OPTIMIZERS, REFUSED_OPTIMIZERS
from rayzero.engine.config.schedules import SCHEDULE_PARAMS, SCHEDULES
from rayzero.engine.validation import check, refuse

S = TypeVar("S", bound=Section)
_REFUSED = {name.lower(): name for name in REFUSED_OPTIMIZERS}


def _named(names: tuple[str, ...], what: str) -> BeforeValidator:
    return BeforeValidator(one_of({name.lower(): name for name in names}, what))


def _optimizer(value: Any) -> Any:
    if isinstance(value, str) and "." in value:
        return value
    if isinstance(value, str) and (name := _REFUSED.get(value.lower())):
        raise ValueError(f"refused: {REFUSED_OPTIMIZERS[name]}")
    return one_of({name.lower(): name for name in OPTIMIZERS}, "an optimizer")(value)


class OptimizerConfig(Section):
    """`{"type": "AdamW", "params": {"lr": 1e-3, ...}}`; params go to the optimizer's class.

    Besides names of DeepSpeed's and torch's, `type` may be a class's dotted name, one that works
    element by element: `my_package.optimizers.Sophia`.
    """

    type: Annotated[str, BeforeValidator(_optimizer)]
    params: dict[str, Any] = Field(default_factory=dict)
    legacy_fusion: bool = False


class SchedulerConfig(Section):
    """`{"type": "WarmupLR", "params": {...}}`: DeepSpeed's schedules, and torch's by name."""

    type: Annotated[str, _named(SCHEDULES, "a schedule")]
    params: dict[str, Any] = Field(default_factory=dict)


def params_mistakes(
    optimizer: OptimizerConfig | None, scheduler: SchedulerConfig | None
) -> list[str]:
    """A line for every mistake in what `params` hold, as far as that can be told without torch."""
    found = []
    if optimizer is not None and optimizer.type in OPTIMIZER_PARAMS:
        found += _check("optimizer", OPTIMIZER_PARAMS[optimizer.type], optimizer.params)[1]
    if scheduler is not None and scheduler.type in SCHEDULE_PARAMS:
        found += _check("scheduler", SCHEDULE_PARAMS[scheduler.type], scheduler.params)[1]
    return found


def typed_params(section: str, model: type[S], params: dict[str, Any]) -> S:
    """A section's params as their model.

    Raises:
        ConfigError: naming every wrong key by its whole path.
    """
    typed, mistakes = _check(section, model, params)
    if typed is None:
        refuse("engine config", mistakes)
    return typed


def _check(section: str, model: type[S], params: dict[str, Any]) -> tuple[S | None, list[str]]:
    """Inside its section, so that messages name the whole path."""
    inner = create_model("Inner", __base__=Section, params=(model, ...))
    fields: dict[str, Any] = {section: (inner, ...)}
    outer = create_model("Outer", __base__=Section, **fields)
    found, mistakes = check(outer, {section: {"params": params}})
    return (None if found is None else getattr(found, section).params), mistakes


def plain_params(params: dict[str, Any]) -> dict[str, Any]:
    """Params of a class that is not ours: text that is a number as that number."""
    return {key: number(one) if isinstance(one, str) else one for key, one in params.items()}
