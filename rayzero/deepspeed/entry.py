"""`rayzero.initialize`: `Engine.build` with DeepSpeed's arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from rayzero.deepspeed.engine import DeepSpeedEngine
from rayzero.engine.api.sharded_params import add_stage3_names
from rayzero.engine.builder import SchedulerLike
from rayzero.engine.config import parse_config
from rayzero.engine.data.loader import StepLoader
from rayzero.engine.data.sample_source import MapDataset
from rayzero.engine.data.streams.block import BlockSource
from rayzero.engine.data.streams.readers import IterableStream
from rayzero.engine.data.streams.source import BlockStream
from rayzero.engine.engine import Engine
from rayzero.engine.errors import ConfigError
from rayzero.engine.optim.build import OptimizerLike
from rayzero.engine.optim.schedule import Scheduler
from rayzero.engine.settings import ConfigLike


def initialize(
    args: Any = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
    training_data: MapDataset | BlockStream | BlockSource | IterableStream | None = None,
    lr_scheduler: SchedulerLike | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigLike | None = None,
    mesh_param: Any = None,
    config_params: ConfigLike | None = None,
    *,
    name: str | None = None,
) -> tuple[DeepSpeedEngine, torch.optim.Optimizer | None, StepLoader | None, Scheduler | None]:
    """DeepSpeed's entry point: `Engine.build` with DeepSpeed's arguments. Collective.

    Args:
        args: the script's arguments, whose `deepspeed_config` and `local_rank` are used, if any.
        model: see `Engine.build`, also for optimizer, model_parameters, training_data,
            lr_scheduler and collate_fn.
        distributed_port: MASTER_PORT, if the environment does not set it.
        mpu: refused, as is mesh_param.
        dist_init_required: False if the script has initialized torch.distributed; None and True
            initialize it if the environment describes several ranks.
        config: a DeepSpeed config file's path, or its contents as a dict; by default the config of
            the rayzero job.
        config_params: the old name of `config`.
        name: see `Engine.build`, also for the errors raised; DeepSpeed has no such argument.

    Returns:
        (engine, optimizer, loader, scheduler); all but the engine may be None. Do not step the
        optimizer or the scheduler: `engine.step()` does.
    """
    _refuse("mpu", mpu, "leave it out: all ranks are data parallel; stage 3 shards large models")
    _refuse("mesh_param", mesh_param, "leave it out: all ranks are one data parallel group")
    if dist_init_required is False and not torch.distributed.is_initialized():
        raise ConfigError(
            "initialize(dist_init_required=False) was given, and torch.distributed has no "
            "process group",
            fix="leave it out, or call torch.distributed.init_process_group before",
        )
    _set_rendezvous_env(args, distributed_port)
    core = Engine.build(
        model,
        optimizer,
        config=_choose_config(args, config, config_params),
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
        name=name,
    )
    add_stage3_names(core)
    engine = DeepSpeedEngine(core)
    return engine, engine.optimizer, core.training_dataloader, engine.lr_scheduler


def _refuse(argument: str, value: Any, reason: str) -> None:
    if value is not None:
        raise ConfigError(f"initialize({argument}=...) was given", allowed="None", fix=reason)


def _choose_config(
    args: Any, config: ConfigLike | None, config_params: ConfigLike | None
) -> ConfigLike | None:
    """Returns the config from the argument that has one; None if none has."""
    places = {
        "initialize(config=...)": config,
        "initialize(config_params=...)": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    given = [(place, value) for place, value in places.items() if value is not None]
    for place, value in given[1:]:
        if parse_config(value) != parse_config(given[0][1]):
            raise ConfigError(
                f"{given[0][0]} and {place} are different configs",
                allowed="one config, or the same one twice",
                fix=f"leave {place} out",
            )
    return given[0][1] if given else None


def _set_rendezvous_env(args: Any, port: int) -> None:
    """Adds to the environment the local rank and the port that the script was given."""
    local_rank = getattr(args, "local_rank", None)
    if isinstance(local_rank, int) and local_rank >= 0:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        os.environ.setdefault("MASTER_PORT", str(port))
