"""Which parameters are Muon's and which are Adam's, for a config that asks for Muon."""

from __future__ import annotations

from typing import Any

from torch import nn

from rayzero.engine.config import OptimizerConfig
from rayzero.engine.config.optim import typed_params
from rayzero.engine.config.optimizers import MuonParams
from rayzero.engine.errors import ConfigError
from rayzero.engine.optim.groups import ParamGroups
from rayzero.engine.optim.muon import ADAM, MUON, is_matrix

ADAMS_NAMES = ("embed", "lm_head")  # DeepSpeed's rule


def halved(model: nn.Module, groups: ParamGroups, config: OptimizerConfig) -> ParamGroups:
    """Every parameter group cut into Muon's and Adam's half, Muon's first; empty ones left out.

    A parameter's own `use_muon` decides, then its group's, then DeepSpeed's rule: Muon has what
    has two dimensions or more and neither "embed" nor "lm_head" in its name. A group's options go
    before `muon_lr` and `adam_lr`, these before `lr`.

    Raises:
        ConfigError: Muon is asked to take a vector.
    """
    params = typed_params("optimizer", MuonParams, config.params)
    halves: dict[tuple[int, bool], int] = {}
    options: list[dict[str, Any]] = []
    ours = {
        param: (number, _takes(name, param, groups.options[number]))
        for name, param in model.named_parameters()
        if (number := groups.of.get(param)) is not None
    }
    for number, given in enumerate(groups.options):
        for muon in (True, False):
            if (number, muon) in ours.values():
                halves[number, muon] = len(options)
                options.append(_options(params, given, muon=muon))
    return ParamGroups({param: halves[half] for param, half in ours.items()}, options)


def _takes(name: str, param: nn.Parameter, group: dict[str, Any]) -> bool:
    asked = getattr(param, "use_muon", group.get("use_muon"))
    if asked is None:
        return is_matrix(param.shape) and not any(word in name.lower() for word in ADAMS_NAMES)
    if asked and not is_matrix(param.shape):
        raise ConfigError(
            f"{name} of shape {tuple(param.shape)} has use_muon",
            allowed="parameters of two dimensions or more",
            fix="use_muon of that parameter, or of its group",
        )
    return bool(asked)


def _options(params: MuonParams, group: dict[str, Any], *, muon: bool) -> dict[str, Any]:
    """One half's options, its own keys only: the most specific comes last."""
    keys = MUON if muon else ADAM
    rate = params.muon_lr if muon else params.adam_lr
    rate = params.lr if rate is None else rate
    found = {key: getattr(params, key) for key in keys} | {
        "lr": keys["lr"] if rate is None else rate
    }
    return found | {key: one for key, one in group.items() if key in keys} | {"use_muon": muon}
