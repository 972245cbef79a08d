"""Makes the optimizer of a run: the user's own, the config's, or none for evaluation.

The constructor that a config selects is data: a row of `OPTIMIZER_PARAMS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from rayzero.engine.config import OptimizerConfig
from rayzero.engine.config.model import coerce_numbers, parse_params
from rayzero.engine.config.optimizers import OPTIMIZER_PARAMS
from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.optim.adafactor import AdafactorUpdate, is_adafactor
from rayzero.engine.optim.param_groups import ParamGroups
from rayzero.engine.optim.sharded_optimizer import (
    OptimizerFactory,
    OptimizerShard,
    ShardedOptimizer,
    check_elementwise,
    group_shards,
    rebind_params,
)
from rayzero.engine.optim.whole_params import NeedsWholeParams
from rayzero.engine.zero.unused_params import UnusedRanges

OptimizerLike = torch.optim.Optimizer | OptimizerFactory


class NoOptimizer(ShardedOptimizer):
    """Placeholder in an engine that only evaluates. It has no parameter groups, so checkpoints have
    none either."""

    def __init__(self) -> None:
        empty = torch.optim.SGD([{"params": []}], lr=0.0)  # torch refuses an empty list
        empty.param_groups.clear()
        super().__init__(empty, ())

    def step(self, factor: float, unused: UnusedRanges = MappingProxyType({})) -> None:
        raise no_optimizer_error("step")


def no_optimizer_error(call: str) -> EngineError:
    """Returns the error for training with an engine that has no optimizer."""
    return EngineError(
        f"{call}() was called, but the engine has no optimizer and can only evaluate",
        allowed="engine(...), save_16bit_model, save_checkpoint, load_checkpoint",
        fix='"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}} in the engine config, or '
        "initialize(optimizer=...)",
    )


def regroup_for_optimizer(
    config: OptimizerConfig | None, model: nn.Module, groups: ParamGroups
) -> ParamGroups:
    """Split parameter groups if the config's optimizer has different algorithms for parameters."""
    row = OPTIMIZER_PARAMS.get(config.type) if config is not None else None
    if config is None or row is None or not row.group_splitter:
        return groups
    split: Callable[..., ParamGroups] = _import_name(row.group_splitter)
    return split(model, groups, parse_params("optimizer", row, config.params))


def make_optimizer(
    given: OptimizerLike | None,
    config: OptimizerConfig | None,
    groups: ParamGroups,
    shards: Sequence[OptimizerShard],
    update_dtype: torch.dtype | None = None,
) -> ShardedOptimizer:
    """Returns this rank's optimizer: the user's own, else the config's, else `NoOptimizer`. Raises
    ConfigError if the optimizer cannot work on shards.

    Args:
        given: an optimizer over the model's parameters, or a function that makes an optimizer from
            parameter groups.
        update_dtype: see `ShardedOptimizer`.
    """
    check_elementwise(given)
    if isinstance(given, torch.optim.Optimizer):
        optimizer = rebind_params(given, shards)
    elif given is not None:
        optimizer = given(group_shards(shards, groups.options))
    elif config is not None:
        optimizer = optimizer_factory(config)(group_shards(shards, groups.options))
    else:
        return NoOptimizer()
    check_elementwise(optimizer)
    if is_adafactor(optimizer):
        AdafactorUpdate(optimizer)
    in_chunks = any(shard.unit.state_store.chunk_numel is not None for shard in shards)
    if in_chunks and isinstance(optimizer, NeedsWholeParams):
        raise ConfigError(
            f"the state of {type(optimizer).__name__} cannot be offloaded to NVMe: the "
            "optimizer needs whole parameters, and files are read in chunks",
            allowed="optimizers that update each element independently, such as AdamW",
            fix='offload_optimizer: {"device": "cpu"}',
        )
    return ShardedOptimizer(optimizer, shards, update_dtype)


def optimizer_factory(config: OptimizerConfig) -> OptimizerFactory:
    """Returns the constructor that a config's `optimizer` section selects: a row of
    `OPTIMIZER_PARAMS`, a class of torch.optim by its name, or any optimizer class by its dotted
    name. Raises ConfigError if a param is unknown to the optimizer, or has a wrong value."""
    row = OPTIMIZER_PARAMS.get(config.type)
    if row is not None:
        implementation = _import_name(row.implementation)
        arguments = parse_params("optimizer", row, config.params).arguments()
    else:
        implementation = _import_optimizer(config.type)
        arguments = coerce_numbers(config.params)

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        try:
            return cast(torch.optim.Optimizer, implementation(groups, **arguments))
        except ConfigError:
            raise
        except (TypeError, ValueError, IndexError, RuntimeError, AttributeError) as error:
            raise ConfigError(
                f"engine config: optimizer.params for {config.type}: {error}",
                fix="optimizer.params in the engine config",
            ) from None

    if row is None:
        check_elementwise(implementation)
        if not is_adafactor(implementation):
            _check_elementwise_by_trial(make, config.type)
    return make


def _check_elementwise_by_trial(make: OptimizerFactory, name: str) -> None:
    """Train two dozen numbers, once as a matrix and once split in two, and compare the results.
    Raises ConfigError if training fails, or the results differ: updates are not elementwise."""
    start, *grads = torch.randn(4, 24, generator=torch.Generator().manual_seed(0))

    def train(split: Callable[[Tensor], Sequence[Tensor]]) -> Tensor:
        params = [nn.Parameter(part.clone()) for part in split(start)]
        optimizer = make([{"params": params}])
        for grad in grads:
            for param, part in zip(params, split(grad), strict=True):
                param.grad = part.clone()
            optimizer.step()
        return torch.cat([param.detach().reshape(-1) for param in params])

    whole = train(lambda values: [values.view(4, 6)])
    if not torch.allclose(whole, train(lambda values: values.split(14)), rtol=1e-4, atol=1e-6):
        raise ConfigError(
            f"the optimizer {name} trains a matrix and its two halves differently, so it cannot "
            "work on shards of parameters",
            allowed="optimizers that update each element independently",
            fix="optimizer.type in the engine config",
        )


def _import_name(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def _import_optimizer(name: str) -> type[torch.optim.Optimizer]:
    try:
        cls = _import_name(name if "." in name else f"torch.optim.{name}")
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"engine config: optimizer.type: {name!r} cannot be imported: {error}",
            allowed="the dotted name of an optimizer's class, such as my_package.optimizers.Sophia",
        ) from None
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(f"engine config: optimizer.type: {name!r} is not a torch.optim.Optimizer")
    return cls
