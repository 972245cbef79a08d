"""DeepSpeed's helpers: utilities, estimates, typed readers, collectives, the accelerator."""

from __future__ import annotations

import random
from argparse import ArgumentParser
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rayzero import deepspeed
from rayzero.deepspeed import comm, estimates, expert_groups, groups, schedule_arguments
from rayzero.deepspeed import config as readers
from rayzero.deepspeed import runtime_utils as utils
from rayzero.deepspeed.accelerator import get_accelerator
from rayzero.deepspeed.lookup import resolve
from rayzero.engine.config.model import SchedulerConfig
from rayzero.engine.config.zero import ZeroConfig
from rayzero.engine.errors import ConfigError
from tests.support.ranks import run_ranks

# Values of DeepSpeed 0.19.8.
ESTIMATES = [
    (96_000_000_000, 2_000_000_000),
    (48_000_000_000, 3_125_000_000),
    (13_500_000_000, 400_000_000, 400_000_000),
    (48_000_000_000, 400_000_000, 400_000_000),
    (12_000_000_000, 525_000_000, 400_000_000),
    (48_000_000_000, 525_000_000, 400_000_000),
    (4_800_000_000, 1_525_000_000, 400_000_000),
    (48_000_000_000, 1_525_000_000, 400_000_000),
]


def test_partitions_equal_deepspeeds() -> None:
    assert utils.partition_uniform(10, 4) == [0, 3, 6, 8, 10]
    assert utils.partition_uniform(2, 3) == [0, 1, 2, 2]


def test_moving_and_seeding(capsys: pytest.CaptureFixture[str]) -> None:
    tensor = torch.zeros(2)
    moved = utils.move_to_device([tensor, (tensor, {"x": tensor})], "meta")
    assert moved[1][1]["x"].is_meta
    assert not tensor.is_meta
    copied = utils.copy_to_device({"x": tensor, "y": 3}, "meta")
    assert copied["x"].is_meta
    assert copied["y"] == 3
    draws = []
    for _ in range(2):
        utils.set_random_seed(7)
        draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1]
    utils.see_memory_usage("silent")
    utils.see_memory_usage("here", force=True)
    assert capsys.readouterr().out.startswith("here\nallocated 0.00 GiB")
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert utils.clip_grad_norm_([parameter], 1.0) == 5.0
    assert parameter.grad.norm() == pytest.approx(1.0, rel=1e-5)
    model = nn.Sequential(nn.Linear(2, 2))
    utils.recursive_setattr(model, "0.bias", None)
    assert utils.recursive_getattr(model, "0.bias") is None


def test_estimates_equal_deepspeeds(capsys: pytest.CaptureFixture[str]) -> None:
    two = estimates.estimate_zero2_model_states_mem_needs
    three = estimates.estimate_zero3_model_states_mem_needs
    seen: list[Any] = [two(10**9, 8, 2, offload) for offload in (True, False)]
    for offload, params in ((True, True), (True, False), (False, False)):
        seen += [three(10**9, 10**8, 8, 2, offload, params, init) for init in (True, False)]
    assert seen == ESTIMATES
    estimates.estimate_zero2_model_states_mem_needs_all_live(nn.Linear(1000, 1000), 8)
    estimates.estimate_zero3_model_states_mem_needs_all_live(nn.Linear(1000, 1000), 8)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 + 2 + 6
    assert "zero_init=1" in lines[-2]


def test_typed_readers() -> None:
    config = {
        "gradient_clipping": 0.3,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 2},
    }
    assert readers.get_gradient_clipping(config) == 0.3
    assert readers.get_optimizer_name(config) == "Adam"
    assert readers.get_scheduler_name(config) is None
    assert readers.get_zero_config(config).stage == readers.ZeroStageEnum.gradients
    precision = {"fp16": {"initial_scale_power": 8}, "bf16": None, "bfloat16": {"enabled": True}}
    fp16 = readers.get_float16_config(precision)
    assert fp16.initial_dynamic_scale() == 256
    assert list(fp16.dynamic_loss_scale_args().values()) == [256, 1000, 2, False, 1]
    assert readers.get_bfloat16_config(precision).enabled
    assert not readers.get_bfloat16_config({"bf16": {}, "bfloat16": {"enabled": True}}).enabled
    zero = readers.DeepSpeedZeroConfig  # what follows is DeepSpeed 0.19.8's
    assert (zero().offload_optimizer, zero().offload_param, zero().overlap_comm) == (None,) * 2 + (
        False,
    )
    assert zero(stage=3).overlap_comm
    assert zero(cpu_offload=True).offload_optimizer.device == "cpu"
    assert zero(cpu_offload_param=True).offload_param.device == "cpu"
    assert zero(cpu_offload_use_pin_memory=True).cpu_offload_use_pin_memory
    assert zero(offload_optimizer={"device": "none"}).offload_optimizer.device == "none"
    fp16_save = zero(stage3_gather_fp16_weights_on_model_save=True)
    assert fp16_save.gather_16bit_weights_on_model_save
    optimizer = resolve("runtime.zero.config", "DeepSpeedZeroOffloadOptimizerConfig")
    assert optimizer(pipeline_read=True).pipeline
    assert not optimizer().pipeline
    typed: Any = ZeroConfig.model_validate({"stage3_param_persistence_threshold": 7})
    assert (typed.param_persistence_threshold, hasattr(typed, "persistence")) == (7, False)

    class Section(readers.DeepSpeedConfigModel):
        size: int = 3

    assert Section(size="auto").size == 3
    assert utils.required_torch_version(min_version=2, max_version="9.1")
    assert not utils.required_torch_version(max_version=1.13)
    with pytest.raises(ValueError, match="extra"):
        Section(sizes=4)
    with pytest.raises(ValueError, match="Duplicate keys"):
        readers.dict_raise_error_on_duplicate_keys([("a", 1), ("a", 2)])


WARMUP = {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 7, "warmup_type": "log"}
RANGE = {"min_lr": 0.001, "step_rate": 1.0, "step_size": 1000, "staircase": False}
RATIOS = {"warmup_min_ratio": 0.01, "cos_min_ratio": 0.01}
CYCLE = {
    "cycle_first_step_size": 1000,
    "cycle_first_stair_count": -1,
    "cycle_second_step_size": -1,
    "cycle_second_stair_count": -1,
    "decay_step_size": 1000,
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "decay_lr_rate": 0.0,
    "cycle_min_mom": 0.8,
    "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0,
}
SCHEDULES = {  # of DeepSpeed 0.19.8
    "LRRangeTest": ({f"lr_range_test_{name}": value for name, value in RANGE.items()}, 0.001),
    "OneCycle": (CYCLE, 0.1),
    "WarmupLR": (WARMUP, 0.001),
    "WarmupDecayLR": (WARMUP, 0.001),
    "WarmupCosineLR": ({"warmup_num_steps": 7, "warmup_type": "log"} | RATIOS, None),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_from_the_command_line_equals_deepspeeds(kind: str) -> None:
    params, rate = SCHEDULES[kind]
    parser = schedule_arguments.add_tuning_arguments(ArgumentParser())
    args = parser.parse_args(["--lr_schedule", kind, "--warmup_num_steps", "7", "--cycle_momentum"])
    config, reason = schedule_arguments.get_config_from_args(args)
    assert (config, reason) == ({"type": kind, "params": params}, None)
    assert schedule_arguments.get_lr_from_config(config or {})[0] == rate
    SchedulerConfig.model_validate(config)
    assert schedule_arguments.get_config_from_args(parser.parse_args([]))[0] is None


def test_accelerator_on_the_cpu() -> None:
    device: Any = get_accelerator()
    assert device.memory_reserved() == device.max_memory_reserved() == 0
    assert 0 < device.available_memory() < device.total_memory()
    assert device.FloatTensor([1.0]).dtype is torch.float32
    assert device.LongTensor(2, 3).shape == (2, 3)
    assert device.Stream() is device.current_stream() is None
    with device.stream(None):
        assert device.use_host_timers()
    with pytest.raises(AttributeError, match="no kernels to compile"):
        _ = device.create_op_builder
    with pytest.raises(ConfigError, match=r"compile\.backend"):
        device.set_compile_backend("eager")


def test_a_module_and_a_function_of_one_name() -> None:
    """`deepspeed.utils.z3_leaf_module` is the function, as in DeepSpeed."""
    layer = nn.Linear(2, 2)
    deepspeed.utils.set_z3_leaf_module(layer, True)
    assert deepspeed.utils.z3_leaf_module(layer)
    module = import_module("rayzero.deepspeed.utils.z3_leaf_module")
    assert module.z3_leaf_module is deepspeed.utils.z3_leaf_module


def test_expert_groups() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    (group,) = expert_groups.configure_moe_param_groups(parameters)
    assert group["params"] == parameters
    assert expert_groups.has_moe_layers(nn.Linear(2, 2)) == (False, 0)
    parameters[0].allreduce = False  # type: ignore[attr-defined]
    assert expert_groups.is_moe_param(parameters[0])
    with pytest.raises(ConfigError, match="allreduce=False"):
        expert_groups.split_params_into_different_moe_groups_for_optimizer({"params": parameters})


def collectives_and_groups(rank_number: int, world: int) -> SimpleNamespace:
    rank = float(dist.get_rank())
    total, parts = torch.tensor([rank]), torch.zeros(2)
    comm.all_reduce(total, log_name="here", prof=True)
    comm.allgather_fn(parts, torch.tensor([rank]))
    several = [torch.tensor([rank]), torch.tensor([2 * rank])]
    comm.all_reduce_coalesced(several, async_op=True).wait()
    gathered = [torch.zeros(2), torch.zeros(2)]
    comm.all_gather_coalesced(gathered, [torch.tensor([rank]), torch.tensor([-rank])])
    alone = torch.tensor([rank])
    comm.inference_all_reduce(alone, group=groups._get_sequence_parallel_group())
    sizes = groups.get_data_parallel_world_size(), groups._get_sequence_parallel_world_size()
    return SimpleNamespace(
        values=[total.item(), parts.tolist(), [one.item() for one in several], alone.item()],
        gathered=[one.tolist() for one in gathered],
        sizes=sizes,
        ranks=comm.get_all_ranks_from_group(),
        is_backend=comm.cdb is comm,
    )


def test_collectives_and_groups_on_two_ranks() -> None:
    for rank, seen in enumerate(run_ranks(2, collectives_and_groups)):
        assert seen.values == [1.0, [0.0, 1.0], [1.0, 2.0], float(rank)]
        assert seen.gathered == [[0.0, 1.0], [0.0, -1.0]]
        assert (seen.sizes, seen.ranks, seen.is_backend) == ((2, 1), [0, 1], True)
