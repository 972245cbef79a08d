"""Parameter groups: each group's trained parameters and options, and the split for Muon."""

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

ADAM_NAME_PATTERNS = ("embed", "lm_head")  # DeepSpeed's rule


@dataclass(frozen=True)
class ParamGroups:
    """The group of each trainable parameter, and the optimizer options of each group."""

    group_of: dict[nn.Parameter, int]
    options: list[dict[str, Any]]


def find_param_groups(
    model: nn.Module,
    given: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None,
    optimizer: torch.optim.Optimizer | None,
) -> ParamGroups:
    """Returns the groups of the user's optimizer, else those of `model_parameters` (`given`), else
    one group with all parameters.

    Parameters in no group are frozen, since their gradients would be unused. Raises ConfigError if
    there are no trainable parameters, or a parameter is in two groups or of another model.
    """
    if given is not None and not isinstance(given, Iterable):
        raise ConfigError(
            f"initialize(model_parameters=...) got {type(given).__name__}",
            allowed="parameters, or groups of them",
            fix="give model.parameters()",
        )
    if optimizer is not None:
        entries: list[Any] = list(optimizer.param_groups)
    else:
        entries = list(model.parameters() if given is None else given)
    if entries and not isinstance(entries[0], dict):
        entries = [{"params": entries}]
    names = {param: name for name, param in model.named_parameters()}
    group_of: dict[nn.Parameter, int] = {}
    for number, entry in enumerate(entries):
        params = entry["params"]
        for param in [params] if isinstance(params, nn.Parameter) else list(params):
            if param not in names:
                raise ConfigError(
                    f"parameter group {number} holds a tensor of shape {tuple(param.shape)} that "
                    "is not a parameter of the model",
                    fix="change model_parameters, or the optimizer: use model.parameters()",
                )
            if group_of.setdefault(param, number) != number:
                raise ConfigError(
                    f"{names[param]} is in parameter groups {group_of[param]} and {number}",
                    allowed="one group for each parameter",
                    fix="change model_parameters, or the optimizer",
                )
    group_of = {param: number for param, number in group_of.items() if param.requires_grad}
    if not group_of:
        raise ConfigError("nothing to train: no parameter given to initialize requires gradients")
    _freeze_others(names, group_of)
    options = [{key: value for key, value in entry.items() if key != "params"} for entry in entries]
    return ParamGroups(group_of, options)


def freeze_all_params(model: nn.Module) -> ParamGroups:
    """Freeze all parameters of a model that is only evaluated."""
    model.requires_grad_(False)
    return ParamGroups({}, [])


def _freeze_others(names: dict[nn.Parameter, str], group_of: dict[nn.Parameter, int]) -> None:
    others = [
        name for param, name in names.items() if param.requires_grad and param not in group_of
    ]
    for param in names.keys() - group_of.keys():
        param.requires_grad_(False)
    if others:
        log.warning(
            "%d parameters require gradients but are in no parameter group, and are frozen: %s%s",
            len(others),
            ", ".join(others[:3]),
            ", ..." if len(others) > 3 else "",
        )


def split_muon_groups(model: nn.Module, groups: ParamGroups, params: MuonParams) -> ParamGroups:
    """Split every parameter group into a Muon and an Adam group. Empty groups are dropped.

    A parameter's own `use_muon` decides, then its group's, then DeepSpeed's rule: Muon for
    parameters of two dimensions or more with neither "embed" nor "lm_head" in the name. A group's
    options override `muon_lr` and `adam_lr`, which override `lr`. Raises ConfigError if `use_muon`
    is set for a vector.
    """
    keys: dict[nn.Parameter, tuple[int, bool]] = {}
    for name, param in model.named_parameters():
        number = groups.group_of.get(param)
        if number is not None:
            keys[param] = number, _uses_muon(name, param, groups.options[number])
    new_numbers: dict[tuple[int, bool], int] = {}
    for number in range(len(groups.options)):
        for muon in (True, False):
            if (number, muon) in keys.values():
                new_numbers[number, muon] = len(new_numbers)
    return ParamGroups(
        {param: new_numbers[key] for param, key in keys.items()},
        [_group_options(params, groups.options[number], muon=muon) for number, muon in new_numbers],
    )


def _uses_muon(name: str, param: nn.Parameter, group: dict[str, Any]) -> bool:
    use_muon = getattr(param, "use_muon", group.get("use_muon"))
    if use_muon is None:
        return is_matrix(param.shape) and not any(
            word in name.lower() for word in ADAM_NAME_PATTERNS
        )
    if use_muon and not is_matrix(param.shape):
        raise ConfigError(
            f"{name} of shape {tuple(param.shape)} has use_muon",
            allowed="use_muon for parameters of two dimensions or more",
            fix="set use_muon of that parameter, or of its group",
        )
    return bool(use_muon)


def _group_options(params: MuonParams, group: dict[str, Any], *, muon: bool) -> dict[str, Any]:
    """Returns the options of a Muon or Adam group: the config's params, overridden by `group`."""
    defaults = MUON_DEFAULTS if muon else ADAM_DEFAULTS
    options = {key: getattr(params, key) for key in defaults}
    lrs = (params.muon_lr if muon else params.adam_lr, params.lr, defaults["lr"])
    options["lr"] = next(lr for lr in lrs if lr is not None)
    own = {key: value for key, value in group.items() if key in defaults}
    return options | own | {"use_muon": muon}
