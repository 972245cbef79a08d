"""Which parameters are trained, in which parameter group, with which options."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayzero.engine.errors import ConfigError

log = logging.getLogger("rayzero.engine")


@dataclass(frozen=True)
class ParamGroups:
    """Each trainable parameter's group, and each group's options for the optimizer."""

    of: dict[nn.Parameter, int]
    options: list[dict[str, Any]]


def find_groups(
    model: nn.Module,
    given: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None,
    optimizer: torch.optim.Optimizer | None,
) -> ParamGroups:
    """The groups of the user's optimizer, else of `model_parameters`, else all in one.

    A parameter in none of them is frozen: it would get gradients that nobody uses.

    Raises:
        ConfigError: there is nothing to train, a parameter is in two groups, or is not the model's.
    """
    if optimizer is not None:
        entries: list[Any] = list(optimizer.param_groups)
    else:
        entries = list(model.parameters() if given is None else given)
    if entries and not isinstance(entries[0], dict):
        entries = [{"params": entries}]
    names = {param: name for name, param in model.named_parameters()}
    of: dict[nn.Parameter, int] = {}
    for number, entry in enumerate(entries):
        params = entry["params"]
        for param in [params] if isinstance(params, nn.Parameter) else list(params):
            if param not in names:
                raise ConfigError(
                    f"parameter group {number} holds a tensor of shape {tuple(param.shape)} that "
                    "is not a parameter of the model",
                    fix="model_parameters, or the optimizer: use model.parameters()",
                )
            if of.setdefault(param, number) != number:
                raise ConfigError(f"{names[param]} is in parameter groups {of[param]} and {number}")
    of = {param: number for param, number in of.items() if param.requires_grad}
    if not of:
        raise ConfigError(
            "there is nothing to train: no parameter given to initialize requires gradients"
        )
    _freeze_others(names, of)
    options = [{key: one for key, one in entry.items() if key != "params"} for entry in entries]
    return ParamGroups(of, options)


def no_groups(model: nn.Module) -> ParamGroups:
    """Nothing is trained: all parameters are frozen."""
    model.requires_grad_(False)
    return ParamGroups({}, [])


def _freeze_others(names: dict[nn.Parameter, str], of: dict[nn.Parameter, int]) -> None:
    others = [param for param in names if param.requires_grad and param not in of]
    for param in others:
        param.requires_grad_(False)
    if others:
        some = ", ".join(names[param] for param in others[:3])
        log.warning(
            "%d parameters require gradients but are in no parameter group, and are frozen: %s%s",
            len(others),
            some,
            ", ..." if len(others) > 3 else "",
        )
