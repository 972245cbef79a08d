"""The systems that `step_time` and `gpu` compare.

A builder takes a model replica and returns a step: forward, backward, clip, update, zero. All use
the same settings: fused AdamW with equal hyperparameters, clip at 1.0, fp32; or, if `mixed`, bf16
with fp32 main weights, by autocast under DDP and by the native setting of the other systems.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import rayzero
from examples.gpt.model import GPT

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
OPTIMIZER: dict[str, Any] = {"type": "AdamW", "params": ADAMW}
CLIP_NORM = 1.0
CPU: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
ALL_ON_CPU: dict[str, Any] = CPU | {"offload_param": {"device": "cpu"}}

Step = Callable[[Tensor, Tensor], Tensor]


def ddp(model: GPT, mixed: bool = False, **options: Any) -> Step:
    wrapped = DistributedDataParallel(model, **options)
    return _plain_step(wrapped, model, autocast=mixed)


def fsdp2(model: GPT, mixed: bool = False, offload: bool = False) -> Step:
    device_type = model.token.weight.device.type
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device_type, (torch.distributed.get_world_size(),))
    }
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device_type == "cuda")
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return _plain_step(model, model, autocast=False)


def _plain_step(forward: torch.nn.Module, model: GPT, *, autocast: bool) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    device_type = model.token.weight.device.type

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device_type, torch.bfloat16, enabled=autocast):
            loss: Tensor = forward(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def zero(model: GPT, stage: int, mixed: bool = False, **offload: Any) -> Step:
    config = _zero_config(stage, mixed, **offload) | {"optimizer": OPTIMIZER}
    engine, *_ = rayzero.initialize(model=model, model_parameters=model.parameters(), config=config)
    return _engine_step(engine)


def deepspeed(model: GPT, stage: int, mixed: bool = False) -> Step:
    import deepspeed as ds  # optional dependency

    engine, *_ = ds.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), fused=True, **ADAMW),
        config=_zero_config(stage, mixed)
        | {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False},
    )
    return _engine_step(engine)


def deepspeed_cpu_adam(
    model: GPT, stage: int, mixed: bool = False, offload: dict[str, Any] = CPU
) -> Step:
    """DeepSpeed with its CPU optimizer, a C++ extension that is built on first use."""
    import deepspeed as ds

    config = _zero_config(stage, mixed, **offload) | {"optimizer": OPTIMIZER}
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    return _engine_step(engine)


def _zero_config(stage: int, mixed: bool, **offload: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP_NORM,
        "bf16": {"enabled": mixed},
        "zero_optimization": {"stage": stage, **offload},
    }


def _engine_step(engine: Any) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


SYSTEMS: dict[str, Callable[..., Step]] = {
    "ddp": partial(ddp, gradient_as_bucket_view=True),
    "ddp-plain": ddp,
    "fsdp2": fsdp2,
    **{f"rayzero-{stage}": partial(zero, stage=stage) for stage in range(4)},
    **{f"deepspeed-{stage}": partial(deepspeed, stage=stage) for stage in range(4)},
}

OFFLOAD_SYSTEMS: dict[str, Callable[..., Step]] = {
    **{f"rayzero-{stage}-cpu": partial(zero, stage=stage, **CPU) for stage in (1, 2, 3)},
    **{f"deepspeed-{stage}-cpu": partial(deepspeed_cpu_adam, stage=stage) for stage in (1, 2, 3)},
    "rayzero-3-all-cpu": partial(zero, stage=3, **ALL_ON_CPU),
    "deepspeed-3-all-cpu": partial(deepspeed_cpu_adam, stage=3, offload=ALL_ON_CPU),
    "fsdp2-all-cpu": partial(fsdp2, offload=True),
}
ALL = SYSTEMS | OFFLOAD_SYSTEMS


def missing_requirement(name: str) -> str:
    """Why a system cannot run on this machine; empty if it can."""
    if name.startswith("deepspeed") and find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    if name == "fsdp2-all-cpu" and not torch.cuda.is_available():
        return "there is no GPU to offload from"
    return ""
