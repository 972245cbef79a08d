"""Training with offload equals training without, to the bit; its state is loaded like any other.
Its bytes are counted where they are.

The matrix (`tests/engine/matrix`) compares with PyTorch, in more combinations, which bf16 lets it
do to some rounding only; `tests/engine/optim/test_parity.py` loads other offloads, stages, ranks.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.session import use_session
from tests.engine import zoo
from tests.engine.offload.training import (
    CPU,
    PARAM,
    config,
    make_engine,
    offload_configs,
    run_steps,
    separate_host_memory,
    train,
)
from tests.engine.state.blocks import Block, StateSession
from tests.support.ranks import run_ranks


def saved_after_two_steps(rank: int, world: int, stage: int) -> Block:
    engine = make_engine(config(stage))
    run_steps(engine, range(2))
    return Block.of(engine)


def _by_name(block: Block) -> bytes:
    """All values, ordered by name: the order within a block may differ."""
    result = b""
    for part in sorted(block.index.ranges, key=lambda part: (part.name, part.start)):
        size = (part.stop - part.start) * block.index.tensors[part.name].item_bytes
        result += bytes(block.data[part.offset : part.offset + size])
    return result


@pytest.mark.parametrize("separate", [False, True], ids=["shared", "separate"])
def test_loaded_state_is_bit_identical(separate: bool, tmp_path: Path) -> None:
    for stage, offload in ((0, "nvme"), (2, "cpu"), (2, "nvme"), (3, "cpu"), (3, "both in files")):
        first = saved_after_two_steps(0, 1, stage)
        zero = offload_configs(tmp_path)[offload]
        with separate_host_memory() if separate else nullcontext():
            with use_session(StateSession([first])):
                engine = make_engine(config(stage, **zero), seed=9)
            second = Block.of(engine)
            engine.close()
        assert first.index.tensors == second.index.tensors
        assert _by_name(first) == _by_name(second), (stage, offload)
        assert len(_by_name(first)) > 1000


def bytes_by_class(stage: int, offload: dict[str, Any]) -> dict[str, int]:
    with separate_host_memory():
        engine = make_engine(config(stage, **offload))
        run_steps(engine, range(1))
    sizes = engine.metrics.bytes
    engine.close()
    return sizes


def test_bytes_by_memory_kind(tmp_path: Path) -> None:
    params = sum(param.numel() for param in zoo.make_model().parameters())
    configs = offload_configs(tmp_path)
    cpu = bytes_by_class(2, CPU)
    assert cpu["main_weights"] == cpu["main_grads"] == cpu["optimizer_state"] == 0
    assert cpu["host_optimizer_state"] == 2 * cpu["host_main_grads"] == 2 * cpu["host_main_weights"]
    cpu_params = bytes_by_class(3, CPU | PARAM)
    assert cpu_params["model_weights"] == 0
    assert cpu_params["host_model_weights"] >= 4 * params
    assert "host_main_weights" not in cpu_params  # they are the model weights
    disk = bytes_by_class(2, configs["nvme"])
    in_files = disk["disk_optimizer_state"]
    assert in_files == 2 * disk["disk_main_weights"] == 2 * disk["host_main_grads"]
    assert disk["host_staging"] > 0
    disk_params = bytes_by_class(3, CPU | configs["param files"])
    assert disk_params["disk_model_weights"] == cpu_params["host_model_weights"]
    assert disk_params["model_weights"] == 0
    half = bytes_by_class(2, configs["half"])
    offloaded = half["host_optimizer_state"]
    assert 0.5 <= offloaded / (offloaded + half["optimizer_state"]) < 0.9  # only entire units are
    assert not [name for name in bytes_by_class(2, {}) if name.startswith(("host_", "disk_"))]


def max_errors(
    rank: int, world: int, stage: int, precision: str, separate_memory: bool, folder: Path
) -> dict[str, float]:
    """Largest relative error against training without offload; 0 if bit-identical."""
    losses, expected = train(config(stage, precision))
    result = {}
    for name, offload in offload_configs(folder, stage).items():
        with separate_host_memory() if separate_memory else nullcontext():
            actual, state = train(config(stage, precision, **offload))
        loss_errors = [abs(a - b) for a, b in zip(actual, losses, strict=True)]
        weights = [zoo.relative_error(state[key], expected[key]) for key in expected]
        result[name] = max(loss_errors + weights)
    return result


@pytest.mark.parametrize(
    ("world", "stage", "precision", "separate_memory"),
    [
        (1, 0, "bf16", True),
        (2, 1, "fp32", True),
        (3, 2, "bf16", True),
        (2, 3, "bf16", True),
        (2, 3, "fp32", False),
    ],
)
def test_offload_is_bit_identical(
    world: int, stage: int, precision: str, separate_memory: bool, tmp_path: Path
) -> None:
    for result in run_ranks(world, max_errors, stage, precision, separate_memory, tmp_path):
        assert result == dict.fromkeys(offload_configs(tmp_path, stage), 0), result
    assert not list(tmp_path.iterdir())  # the file is unlinked
