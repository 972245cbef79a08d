"""Which parameter in which group; Muon/Adam split.

Which parameters are trained, in which parameter group, with which options.

Which parameters are Muon's and which are Adam's, for a config that asks for Muon.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayzero.engine.config.optimizers import MuonParams
from rayzero.engine.errors import ConfigError
from rayzero.engine.optim.muon import ADAM_DEFAULTS, MUON_DEFAULTS, is_matrix

log = logging.getLogger("rayzero.engine")


@dataclass(frozen=True)
class ParamGroups:
    """Each trainable parameter's group, and each group's options for the optimizer."""

    group_of: dict[nn.Parameter, int]
    options: list[dict[str, Any]]


def find_param_groups(
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


def freeze_all_params(model: nn.Module) -> ParamGroups:
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


ADAM_NAME_PATTERNS = ("embed", "lm_head")  # DeepSpeed's rule


def split_muon_groups(model: nn.Module, groups: ParamGroups, params: MuonParams) -> ParamGroups:
    """Every parameter group cut into Muon's and Adam's half, Muon's first; empty ones left out.

    A parameter's own `use_muon` decides, then its group's, then DeepSpeed's rule: Muon has what
    has two dimensions or more and neither "embed" nor "lm_head" in its name. A group's options go
    before `muon_lr` and `adam_lr`, these before `lr`.

    Raises:
        ConfigError: Muon is asked to take a vector.
    """
    halves: dict[tuple[int, bool], int] = {}
    options: list[dict[str, Any]] = []
    ours = {
        param: (number, _uses_muon(name, param, groups.options[number]))
        for name, param in model.named_parameters()
        if (number := groups.group_of.get(param)) is not None
    }
    for number, given in enumerate(groups.options):
        for muon in (True, False):
            if (number, muon) in ours.values():
                halves[number, muon] = len(options)
                options.append(_group_options(params, given, muon=muon))
    return ParamGroups({param: halves[half] for param, half in ours.items()}, options)


def _uses_muon(name: str, param: nn.Parameter, group: dict[str, Any]) -> bool:
    asked = getattr(param, "use_muon", group.get("use_muon"))
    if asked is None:
        return is_matrix(param.shape) and not any(
            word in name.lower() for word in ADAM_NAME_PATTERNS
        )
    if asked and not is_matrix(param.shape):
        raise ConfigError(
            f"{name} of shape {tuple(param.shape)} has use_muon",
            allowed="parameters of two dimensions or more",
            fix="use_muon of that parameter, or of its group",
        )
    return bool(asked)


def _group_options(params: MuonParams, group: dict[str, Any], *, muon: bool) -> dict[str, Any]:
    """One half's options, its own keys only: the most specific comes last."""
    keys = MUON_DEFAULTS if muon else ADAM_DEFAULTS
    rate = params.muon_lr if muon else params.adam_lr
    rate = params.lr if rate is None else rate
    found = {key: getattr(params, key) for key in keys} | {
        "lr": keys["lr"] if rate is None else rate
    }
    return found | {key: one for key, one in group.items() if key in keys} | {"use_muon": muon}
