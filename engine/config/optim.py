"""The sections `optimizer` and `scheduler`. What their params mean is told in `engine/optim`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from rayzero.engine.config.fields import Section, one_of

OPTIMIZERS = ("Adam", "AdamW", "SGD")
"""The optimizers that `optimizer.type` may name, in any case."""

SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
"""The schedules that `scheduler.type` may name, in any case."""


def _named(names: tuple[str, ...], what: str) -> BeforeValidator:
    return BeforeValidator(one_of({name.lower(): name for name in names}, what))


class OptimizerConfig(Section):
    """`{"type": "AdamW", "params": {"lr": 1e-3, ...}}`; params go to the optimizer's class."""

    type: Annotated[str, _named(OPTIMIZERS, "an optimizer")]
    params: dict[str, Any] = Field(default_factory=dict)
    legacy_fusion: bool = False


class SchedulerConfig(Section):
    """`{"type": "WarmupLR", "params": {...}}`: a pure function of the step sets every lr."""

    type: Annotated[str, _named(SCHEDULES, "a schedule")]
    params: dict[str, Any] = Field(default_factory=dict)
