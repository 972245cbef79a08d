"""`initialize`: its arguments, where the config comes from. What is built is up to `factory`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rayzero.engine.api.params import register_params
from rayzero.engine.builder import SchedulerLike, build_engine
from rayzero.engine.config import EngineConfig, parse_config
from rayzero.engine.config.explain import log_explanation
from rayzero.engine.config.parse import ParsedConfig, parse_with_provenance
from rayzero.engine.data.loader import MapDataset, StepLoader
from rayzero.engine.engine import Engine
from rayzero.engine.errors import ConfigError
from rayzero.engine.optim.build import OptimizerLike
from rayzero.engine.optim.schedule import Scheduler
from rayzero.engine.session import current_session

log = logging.getLogger("rayzero.engine")

ConfigLike = str | Path | dict[str, Any] | EngineConfig


# torch's own defaults
DEFAULT_OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 1e-2}}


_REFUSED_ARGUMENTS = {
    "mpu": "model parallelism is not part of this engine: ranks are data parallel, and stage 3 "
    "shards models that do not fit",
    "mesh_param": "sequence parallelism is not part of this engine: all ranks are one data "
    "parallel group",
}


def initialize(
    args: Any = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
    training_data: MapDataset | None = None,
    lr_scheduler: SchedulerLike | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigLike | None = None,
    mesh_param: Any = None,
    config_params: ConfigLike | None = None,
) -> tuple[Engine, torch.optim.Optimizer | None, StepLoader | None, Scheduler | None]:
    """Makes an engine of a model. Collective: every rank calls it with the same arguments.

    Args:
        args: the script's arguments: `deepspeed_config` and `local_rank` are read, if it has them.
        model: the model, the same on every rank (rank 0's values are taken), or a function that
            builds it, which is then called without the memory for it (`zero_init`).
        optimizer: a fresh torch optimizer over the model's parameters, or a function of parameter
            groups that makes one; by default what the config asks for. With neither, the model is
            frozen, and only evaluated.
        model_parameters: parameters or parameter groups to train; by default those of the
            optimizer, or all that require gradients.
        training_data: a map-style dataset; None if you bring your own batches.
        lr_scheduler: a scheduler of that optimizer, or a function of the optimizer that makes one.
            It is stepped once a step.
        distributed_port: where ranks meet, if the environment says everything else but that.
        mpu: refused.
        dist_init_required: False if a process group must be there already; None and True make one
            where the environment says that there are other ranks.
        collate_fn: makes a batch of a list of samples.
        config: a DeepSpeed config file's path, or its contents; by default the job's, inside a
            rayzero job. With none at all every setting is the default, and the optimizer, if none
            is given either, AdamW with a learning rate of 1e-3.
        mesh_param: refused.
        config_params: the old name of `config`.

    Returns:
        (engine, optimizer, loader, scheduler); all but the engine may be None.
        Do not step the optimizer or the scheduler: `engine.step()` does.

    Raises:
        ConfigError: the config, the model and the ranks do not fit together.
        DataError: the dataset is empty, or is not map-style.
    """
    _refuse_arguments(mpu=mpu, mesh_param=mesh_param)
    _check_process_group(dist_init_required)
    _set_rendezvous_env(args, distributed_port)
    parsed = _parse_or_default(
        _resolve_config(args, config, config_params), optimizer, lr_scheduler
    )
    made = build_engine(
        parsed.config, model, optimizer, model_parameters, training_data, lr_scheduler, collate_fn
    )
    register_params(made[0])
    if made[0].rank == 0:
        log_explanation(parsed)
    return made


def _refuse_arguments(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"initialize({name}=...) was given", allowed="None", fix=_REFUSED_ARGUMENTS[name]
            )


def _resolve_config(
    args: Any, config: ConfigLike | None, config_params: ConfigLike | None
) -> ConfigLike | None:
    """The one config that was given, in whatever place; else the job's; else None."""
    places = {
        "initialize(config=...)": config,
        "initialize(config_params=...)": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    given = {place: value for place, value in places.items() if value is not None}
    if not given:
        session = current_session()
        return session.engine_config if session is not None else None
    (first, chosen), *others = given.items()
    for place, value in others:
        if parse_config(value) != parse_config(chosen):
            raise ConfigError(
                f"{first} and {place} are different configs",
                allowed="one config, or the same one twice",
                fix=f"leave {place} out",
            )
    return chosen


def _parse_or_default(
    chosen: ConfigLike | None,
    optimizer: OptimizerLike | None,
    lr_scheduler: SchedulerLike | None,
) -> ParsedConfig:
    if chosen is not None or optimizer is not None:
        parsed = parse_with_provenance(chosen)
        if optimizer is None and parsed.config.optimizer is None:
            _check_evaluation_only(parsed.config, lr_scheduler)
        return parsed
    if _is_rank_zero():
        log.warning(
            "initialize() was given neither a config nor an optimizer: AdamW with a learning rate "
            "of 1e-3, and every other setting as it is by default"
        )
    return parse_with_provenance({"optimizer": DEFAULT_OPTIMIZER})


def _check_evaluation_only(config: EngineConfig, lr_scheduler: SchedulerLike | None) -> None:
    """There is no optimizer: whether that can be meant."""
    lacking = {
        "a rayzero job, which trains": current_session() is not None,
        "a scheduler": lr_scheduler is not None or config.scheduler is not None,
    }
    for what, is_there in lacking.items():
        if is_there:
            raise ConfigError(
                f"there is no optimizer, but {what}",
                allowed='"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}} in the engine '
                "config, or initialize(optimizer=...)",
            )
    if _is_rank_zero():
        log.warning(
            "initialize() was given no optimizer: the engine only evaluates, and the model's "
            "parameters are frozen"
        )


def _is_rank_zero() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _check_process_group(required: bool | None) -> None:
    """Holds a script to what it said of the process group."""
    if required is False and not torch.distributed.is_initialized():
        raise ConfigError(
            "initialize(dist_init_required=False) was given, and there is no process group",
            fix="leave it out, or call torch.distributed.init_process_group before",
        )


def _set_rendezvous_env(args: Any, port: int) -> None:
    """Tells `connect` what the script knows and the environment does not."""
    local_rank = getattr(args, "local_rank", None)
    if isinstance(local_rank, int) and local_rank >= 0:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        os.environ.setdefault("MASTER_PORT", str(port))
