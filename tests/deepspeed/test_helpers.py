"""DeepSpeed's helpers: utilities, estimates, typed sections, collectives, the accelerator."""

from __future__ import annotations

import random
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rayzero import deepspeed
from rayzero.deepspeed import comm, estimates, groups
from rayzero.deepspeed import runtime_utils as utils
from rayzero.deepspeed.accelerator import get_accelerator
from rayzero.deepspeed.config import DeepSpeedZeroConfig
from rayzero.deepspeed.lookup import resolve
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


def test_helpers_of_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    tensor = torch.zeros(2)
    moved = utils.move_to_device([tensor, (tensor, {"x": tensor}, 3)], "meta")
    assert moved[1][1]["x"].is_meta
    assert (moved[1][2], tensor.is_meta) == (3, False)
    draws = []
    for _ in range(2):
        utils.set_random_seed(7)
        draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1]
    utils.see_memory_usage("silent")
    utils.see_memory_usage("here", force=True)
    assert capsys.readouterr().out.startswith("here\nallocated 0.00 GiB")
    model = nn.Sequential(nn.Linear(2, 2))
    utils.recursive_setattr(model, "0.bias", None)
    assert utils.recursive_getattr(model, "0.bias") is None
    # `deepspeed.utils.z3_leaf_module` is the function of that module, as in DeepSpeed.
    deepspeed.utils.set_z3_leaf_module(model[0], True)
    assert deepspeed.utils.z3_leaf_module(model[0])
    module = import_module("rayzero.deepspeed.utils.z3_leaf_module")
    assert module.z3_leaf_module is deepspeed.utils.z3_leaf_module


def test_estimates_equal_deepspeeds(capsys: pytest.CaptureFixture[str]) -> None:
    two = estimates.estimate_zero2_model_states_mem_needs
    three = estimates.estimate_zero3_model_states_mem_needs
    seen: list[Any] = [two(10**9, 8, 2, offload) for offload in (True, False)]
    for offload, params in ((True, True), (True, False), (False, False)):
        seen += [three(10**9, 10**8, 8, 2, offload, params, init) for init in (True, False)]
    assert seen == ESTIMATES
    estimates.estimate_zero2_model_states_mem_needs_all_live(nn.Linear(1000, 1000), 8)
    estimates.estimate_zero3_model_states_mem_needs_all_live(nn.Linear(1000, 1000), num_nodes=2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 + 2 + 6
    assert lines[-2].endswith("offload_param=none, offload_optimizer=none, zero_init=1")


def test_typed_sections_equal_deepspeeds() -> None:
    zero = DeepSpeedZeroConfig
    plain: Any = zero()
    assert (plain.offload_optimizer, plain.offload_param, plain.overlap_comm) == (None, None, False)
    assert zero(stage=3).overlap_comm
    assert zero(cpu_offload=True).offload_optimizer.device == "cpu"
    assert zero(cpu_offload_param=True).offload_param.device == "cpu"
    assert zero(cpu_offload_use_pin_memory=True).cpu_offload_use_pin_memory
    assert zero(offload_optimizer={"device": "none"}).offload_optimizer.device == "none"
    fp16_save = zero(stage3_gather_fp16_weights_on_model_save=True)
    assert fp16_save.gather_16bit_weights_on_model_save
    optimizer = resolve("runtime.zero.config", "DeepSpeedZeroOffloadOptimizerConfig")
    assert [optimizer(**section).pipeline for section in ({"pipeline_read": True}, {})] == [True, 0]
    typed: Any = ZeroConfig.model_validate({"stage3_param_persistence_threshold": 7})
    assert (typed.param_persistence_threshold, hasattr(typed, "persistence")) == (7, False)
    fp16 = resolve("runtime.precision_config", "DeepSpeedFP16Config")(initial_scale_power=8)
    assert fp16.initial_dynamic_scale() == 256
    assert list(fp16.dynamic_loss_scale_args().values()) == [256, 1000, 2, False, 1]


def test_accelerator_on_the_cpu() -> None:
    device: Any = get_accelerator()
    assert device.memory_reserved() == device.max_memory_reserved() == 0
    assert 0 < device.available_memory() < device.total_memory()
    assert (device.device_count(), device.current_device_name()) == (1, "cpu")
    assert device.FloatTensor([1.0]).dtype is torch.float32
    assert device.LongTensor(2, 3).shape == (2, 3)
    assert device.Stream() is device.current_stream() is None
    with device.stream(None):
        assert device.use_host_timers()
    state = device.get_rng_state()
    drawn = torch.rand(2)
    device.set_rng_state(state, 0)
    assert torch.equal(torch.rand(2), drawn)
    with pytest.raises(AttributeError, match="no kernels to compile"):
        _ = device.create_op_builder
    with pytest.raises(ConfigError, match=r"compile\.backend"):
        device.set_compile_backend("eager")


def collectives_and_groups(rank_number: int, world: int) -> SimpleNamespace:
    rank = float(dist.get_rank())
    total, parts = torch.tensor([rank]), torch.zeros(2)
    comm.all_reduce(total, log_name="here", prof=True)
    comm.allgather_fn(parts, torch.tensor([rank]))
    several = [torch.tensor([rank]), torch.tensor([2 * rank])]
    comm.all_reduce_coalesced(several, async_op=True).wait()
    alone = torch.tensor([rank])
    comm.inference_all_reduce(alone, group=groups._get_sequence_parallel_group())
    sizes = groups.get_data_parallel_world_size(), groups._get_sequence_parallel_world_size()
    return SimpleNamespace(
        values=[total.item(), parts.tolist(), [one.item() for one in several], alone.item()],
        others=(sizes, comm.get_all_ranks_from_group(), comm.cdb is comm),
    )


def test_collectives_and_groups_on_two_ranks() -> None:
    for rank, seen in enumerate(run_ranks(2, collectives_and_groups)):
        assert seen.values == [1.0, [0.0, 1.0], [1.0, 2.0], float(rank)]
        assert seen.others == ((2, 1), [0, 1], True)
