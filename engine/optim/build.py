"""Makes the optimizer of a run: the user's own, or the one that the config asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, cast

import torch
from torch import nn

from rayzero.engine.config import OptimizerConfig
from rayzero.engine.config.optim import plain_params, typed_params
from rayzero.engine.config.optimizers import (
    OPTIMIZER_PARAMS,
    AdagradParams,
    AdamParams,
    LambParams,
    LionParams,
    MuonParams,
    OneBitAdamParams,
    OptimizerParams,
    SGDParams,
    TorchParams,
)
from rayzero.engine.errors import ConfigError
from rayzero.engine.offload.optimizer import optimizer_class
from rayzero.engine.optim.adam import UncorrectedAdam
from rayzero.engine.optim.groups import ParamGroups
from rayzero.engine.optim.halves import halved
from rayzero.engine.optim.lamb import Lamb
from rayzero.engine.optim.lion import Lion
from rayzero.engine.optim.local import (
    LocalOptimizer,
    MakeOptimizer,
    Run,
    check_elementwise,
    group_runs,
    take_over,
)
from rayzero.engine.optim.muon import Muon
from rayzero.engine.optim.nothing import NoOptimizer
from rayzero.engine.optim.onebit import OneBitAdam
from rayzero.engine.optim.trial import check_by_trial
from rayzero.engine.optim.whole import NeedsWholes, Wholes

Groups = list[dict[str, Any]]
OptimizerLike = torch.optim.Optimizer | MakeOptimizer
_REGROUPED = {"Muon": halved}  # optimizers that treat parameters differently


def groups_for(
    config: OptimizerConfig | None, model: nn.Module, groups: ParamGroups
) -> ParamGroups:
    """The parameter groups as the optimizer of a config needs them."""
    regroup = _REGROUPED.get(config.type) if config is not None else None
    return groups if regroup is None or config is None else regroup(model, groups, config)


def make_optimizer(
    given: OptimizerLike | None,
    config: OptimizerConfig | None,
    groups: ParamGroups,
    runs: Sequence[Run],
    wholes: Callable[[], Wholes],
) -> LocalOptimizer:
    """The optimizer of this rank: the user's own, else the config's, else none.

    Args:
        given: an optimizer of the model's parameters, or a function of groups that makes one.
        wholes: makes what an optimizer that looks at whole parameters is given.

    Raises:
        ConfigError: it cannot work on shards.
    """
    check_elementwise(given)
    if isinstance(given, torch.optim.Optimizer):
        made = take_over(given, runs)
    elif given is not None:
        made = given(group_runs(runs, groups.options))
    elif config is not None:
        made = maker(config)(group_runs(runs, groups.options))
    else:
        return NoOptimizer()
    check_elementwise(made)
    if isinstance(made, NeedsWholes):
        _check_room(made, runs)
        made.bind(wholes())
    return optimizer_class(runs)(made, runs)


def _check_room(optimizer: torch.optim.Optimizer, runs: Sequence[Run]) -> None:
    """Raises ConfigError: state that comes from files by pieces never is whole."""
    if any(run.unit.home.piece_numel is not None for run in runs):
        raise ConfigError(
            f"the state of {type(optimizer).__name__} cannot rest in files: it needs whole "
            "parameters, and files are read by pieces of them",
            allowed="optimizers that update each element by itself, such as AdamW",
            fix='offload_optimizer: {"device": "cpu"}',
        )


def maker(config: OptimizerConfig) -> MakeOptimizer:
    """The constructor that a config's `optimizer` section asks for.

    Raises:
        ConfigError: a parameter is unknown to the optimizer, or has a wrong value.
    """
    model = OPTIMIZER_PARAMS.get(config.type)
    if model is None:
        return _of_class(config)
    params = typed_params("optimizer", model, config.params)
    build = _BUILDERS[config.type]
    return _guarded(config, lambda groups: build(params, groups))


def _adam(params: AdamParams, groups: Groups, *, decoupled: bool) -> torch.optim.Optimizer:
    decay = params.weight_decay
    if decay is None:
        decay = 0.01 if params.torch_adam and decoupled else 0.0
    options = _chosen(params, "lr", "betas", "eps", "amsgrad") | {"weight_decay": decay}
    cls = torch.optim.Adam if params.bias_correction else UncorrectedAdam
    if decoupled and params.bias_correction:
        return torch.optim.AdamW(groups, **options, **_switches(params))
    return cls(groups, decoupled_weight_decay=decoupled, **options, **_switches(params))


def _sgd(params: SGDParams, groups: Groups) -> torch.optim.Optimizer:
    options = _chosen(params, "lr", "weight_decay", "momentum", "dampening", "nesterov")
    return torch.optim.SGD(groups, **options, **_switches(params))


def _adagrad(params: AdagradParams, groups: Groups) -> torch.optim.Optimizer:
    options = _chosen(params, "lr", "weight_decay", "lr_decay", "initial_accumulator_value", "eps")
    return torch.optim.Adagrad(groups, **options, **_switches(params))


def _lion(params: LionParams, groups: Groups) -> torch.optim.Optimizer:
    return Lion(groups, **_chosen(params, "lr", "betas", "weight_decay"))


def _lamb(params: LambParams, groups: Groups) -> torch.optim.Optimizer:
    options = _chosen(params, "lr", "betas", "eps", "weight_decay", "bias_correction")
    bounds = _chosen(params, "eps_inside_sqrt", "min_coeff", "max_coeff")
    return Lamb(groups, **options, **bounds)


def _muon(params: MuonParams, groups: Groups) -> torch.optim.Optimizer:
    return Muon(groups, decoupled=params.adam_w_mode)


def _one_bit_adam(params: OneBitAdamParams, groups: Groups) -> torch.optim.Optimizer:
    options = _chosen(params, "lr", "betas", "eps", "weight_decay", "freeze_step")
    return OneBitAdam(groups, **options)


# Every builder gets the params of its own row in OPTIMIZER_PARAMS.
_BUILDERS: Mapping[str, Callable[[Any, Groups], torch.optim.Optimizer]] = {
    "Adam": lambda params, groups: _adam(params, groups, decoupled=params.adam_w_mode),
    "AdamW": lambda params, groups: _adam(params, groups, decoupled=True),
    "SGD": _sgd,
    "Adagrad": _adagrad,
    "Lion": _lion,
    "Lamb": _lamb,
    "Muon": _muon,
    "OneBitAdam": _one_bit_adam,
}


def _chosen(params: OptimizerParams, *keys: str) -> dict[str, Any]:
    return {key: getattr(params, key) for key in keys}


def _switches(params: TorchParams) -> dict[str, Any]:
    """torch's fused kernel, unless another way is asked for."""
    fused = not params.foreach if params.fused is None else params.fused
    return {"fused": fused, "foreach": params.foreach, "maximize": params.maximize}


def _of_class(config: OptimizerConfig) -> MakeOptimizer:
    """One of torch's by its name, or any by its dotted name."""
    cls = _imported(config.type) if "." in config.type else getattr(torch.optim, config.type)
    check_elementwise(cls)
    params = plain_params(config.params)
    make = _guarded(config, lambda groups: cast(torch.optim.Optimizer, cls(groups, **params)))
    check_by_trial(make, config.type)
    return make


def _imported(name: str) -> Callable[..., Any]:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"engine config: optimizer.type: {name!r} cannot be imported: {error}",
            allowed="the dotted name of an optimizer's class, such as my_package.optimizers.Sophia",
        ) from None
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(f"engine config: optimizer.type: {name!r} is not a torch.optim.Optimizer")
    return found


def _guarded(config: OptimizerConfig, make: MakeOptimizer) -> MakeOptimizer:
    """What torch refuses is a mistake in the config."""

    def guarded(groups: Groups) -> torch.optim.Optimizer:
        try:
            return make(groups)
        except (TypeError, ValueError, IndexError, RuntimeError, AttributeError) as error:
            raise ConfigError(
                f"engine config: optimizer.params for {config.type}: {error}",
                fix="optimizer.params in the engine config",
            ) from None

    return guarded
