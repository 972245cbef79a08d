"""Offloaded state is saved like any other: it can be loaded with any offload config."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rayzero
from rayzero.engine.session import use_session
from tests.engine import zoo
from tests.engine.offload.training import CLIP, SAMPLES, config, run_steps, separate_host_memory
from tests.engine.state.blocks import Block, StateSession
from tests.support.ranks import run_ranks

CPU = {"offload_optimizer": {"device": "cpu"}}
PARTIAL = {"offload_optimizer": {"device": "cpu", "ratio": 0.4}}
PARAM = {"offload_param": {"device": "cpu"}}
NVME = {"offload_optimizer": {"device": "nvme", "buffer_count": 2}, "sub_group_size": 96}

# (stage, world size, offload config, whether host memory is separate)
CONFIGS: list[tuple[int, int, dict[str, Any], bool]] = [
    (3, 2, CPU | PARAM, True),
    (1, 2, NVME, True),
    (2, 3, NVME, False),
    (0, 1, CPU, True),
    (3, 3, NVME | PARAM, True),
    (2, 1, PARTIAL, True),
    (3, 2, {}, False),
    (0, 2, NVME, False),
]
STEPS_EACH = 2


def train_steps(
    rank: int,
    world: int,
    stage: int,
    dtype: torch.dtype,
    offload: dict[str, Any],
    separate: bool,
    steps: range,
    blocks: list[Block] | None,
) -> tuple[Block, dict[str, Tensor], list[float], dict[str, int]]:
    model = zoo.make_model(dtype, seed=rank + steps.start)
    with use_session(StateSession(blocks)), separate_host_memory() if separate else nullcontext():
        engine, *_ = rayzero.initialize(
            model=model,
            model_parameters=zoo.two_groups(model),
            optimizer=zoo.adamw,
            config=config(stage, **offload),
        )
    assert engine.progress.step == steps.start
    losses = run_steps(engine, steps)
    result = Block.of(engine), engine.state_dict(), losses, engine.metrics.bytes
    engine.close()
    return result


def test_changing_offload_equals_pytorch(tmp_path: Path) -> None:
    blocks, losses, state = None, [], {}
    for number, (stage, world, offload, separate) in enumerate(CONFIGS):
        steps = range(number * STEPS_EACH, (number + 1) * STEPS_EACH)
        if offload.get("offload_optimizer", {}).get("device") == "nvme":
            offload = offload | {
                "offload_optimizer": offload["offload_optimizer"] | {"nvme_path": str(tmp_path)}
            }
        results = run_ranks(
            world, train_steps, stage, torch.float64, offload, separate, steps, blocks
        )
        blocks = [block for block, *_ in results]
        losses += results[0][2]
        state = results[0][1]
    data = list(zoo.batches(STEPS_EACH * len(CONFIGS), SAMPLES))
    expected_losses, expected = zoo.train_reference(
        zoo.make_model(torch.float64), zoo.adamw, data, CLIP
    )
    assert losses == pytest.approx(expected_losses, rel=1e-9)
    errors = {name: zoo.relative_error(state[name], expected[name]) for name in expected}
    assert max(errors.values()) <= 1e-9, errors


def reload(
    rank: int, world: int, stage: int, offload: dict[str, Any], separate: bool
) -> tuple[bytes, bytes]:
    """Bytes of a state before and after it is loaded into an engine with offload."""
    first = train_steps(rank, world, stage, torch.float32, {}, False, range(2), None)[0]
    with use_session(StateSession([first])), separate_host_memory() if separate else nullcontext():
        model = zoo.make_model(seed=9)
        engine, *_ = rayzero.initialize(
            model=model,
            model_parameters=zoo.two_groups(model),
            optimizer=zoo.adamw,
            config=config(stage, **offload),
        )
    second = Block.of(engine)
    assert first.index.ranges
    assert first.index.tensors == second.index.tensors
    return _by_name(first), _by_name(second)


def _by_name(block: Block) -> bytes:
    """All values, ordered by name: the order within a block may differ."""
    result = b""
    for part in sorted(block.index.ranges, key=lambda part: (part.name, part.start)):
        size = (part.stop - part.start) * block.index.tensors[part.name].item_bytes
        result += bytes(block.data[part.offset : part.offset + size])
    return result


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_loaded_state_is_bit_identical(device: str, separate: bool, tmp_path: Path) -> None:
    offload = CPU if device == "cpu" else {"sub_group_size": 64}
    if device == "nvme":
        offload["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    for stage in (0, 2, 3):
        before, after = run_ranks(1, reload, stage, offload, separate)[0]
        assert before == after
        assert len(before) > 1000


def test_bytes_by_memory_kind(tmp_path: Path) -> None:
    params = sum(param.numel() for param in zoo.make_model().parameters())

    def bytes_by_class(
        stage: int, offload: dict[str, Any], separate: bool = True
    ) -> dict[str, int]:
        results = run_ranks(1, train_steps, stage, torch.float32, offload, separate, range(1), None)
        return results[0][3]

    cpu = bytes_by_class(2, CPU)
    assert cpu["main_weights"] == cpu["main_grads"] == cpu["optimizer_state"] == 0
    assert cpu["host_optimizer_state"] == 2 * cpu["host_main_grads"] == 2 * cpu["host_main_weights"]
    cpu_params = bytes_by_class(3, CPU | PARAM)
    assert cpu_params["model_weights"] == 0
    assert cpu_params["host_model_weights"] >= 4 * params
    assert "host_main_weights" not in cpu_params  # they are the model weights
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    disk = bytes_by_class(2, {"offload_optimizer": nvme})
    assert (
        disk["disk_optimizer_state"] == 2 * disk["disk_main_weights"] == 2 * disk["host_main_grads"]
    )
    assert disk["host_staging"] > 0
    disk_params = bytes_by_class(3, CPU | {"offload_param": nvme})
    assert disk_params["disk_model_weights"] == cpu_params["host_model_weights"]
    assert disk_params["model_weights"] == 0
    partial = bytes_by_class(2, PARTIAL)
    ratio = partial["host_optimizer_state"] / (
        partial["host_optimizer_state"] + partial["optimizer_state"]
    )
    assert 0.4 <= ratio < 0.8  # only entire units are offloaded
    none = bytes_by_class(2, {})
    assert not [name for name in none if name.startswith(("host_", "disk_"))]
