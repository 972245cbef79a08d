"""Every optimizer equals plain PyTorch, while the stage, the ranks and the offload change."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rayzero
from rayzero.engine.session import use_session
from tests.engine import zoo
from tests.engine.offload.training import (
    CLIP,
    SAMPLES,
    config,
    offload_configs,
    run_steps,
    separate_host_memory,
)
from tests.engine.optim.references import PAIRS
from tests.engine.state.blocks import Block, StateSession
from tests.support.ranks import run_ranks

# (stage, world size, offload, whether host memory is separate), one after another.
MOVES = [
    (3, 2, "", False),
    (1, 2, "nvme", True),
    (0, 0, "cpu", True),
    (2, 3, "nvme", False),
    (3, 3, "nvme and param", True),
    (2, 2, "half", True),
    (0, 2, "", False),
    (3, 2, "both", True),
    (1, 3, "", False),
    (3, 3, "both in files", True),
]
WHOLE = ("lamb", "muon", "adafactor", "adafactor_without_lr")  # their state cannot be in files
TrainResult = tuple[list[float], dict[str, Tensor], Block]


def train_each(
    rank: int, world: int, move: int, folder: Path, blocks: dict[str, list[Block]]
) -> dict[str, TrainResult]:
    """A step of every optimizer, from the state of the last move; the first is of two steps."""
    stage, _, offload, separate = MOVES[move]
    steps, results = range(move + 1 if move else 0, move + 2), {}
    for name, (section, _) in PAIRS.items():
        zero = offload_configs(folder)[offload]
        if name in WHOLE and "sub_group_size" in zero:
            zero = offload_configs(folder)["cpu"]
        model = zoo.make_model(torch.float64, seed=rank + steps.start)
        session = use_session(StateSession(blocks.get(name)))
        with session, separate_host_memory() if separate else nullcontext():
            engine, *_ = rayzero.initialize(
                model=model,
                model_parameters=zoo.two_groups(model),
                config=config(stage, **zero) | {"optimizer": section},
            )
        assert engine.progress.step == steps.start
        results[name] = run_steps(engine, steps), engine.state_dict(), Block.of(engine)
        engine.close()
    return results


@cache
def expected_training(name: str) -> tuple[list[float], dict[str, Tensor]]:
    data = list(zoo.batches(len(MOVES) + 1, SAMPLES))
    make: Any = PAIRS[name][1]
    return zoo.train_reference(zoo.make_model(torch.float64), make, data, CLIP)


def test_equals_pytorch_at_changing_places(tmp_path: Path) -> None:
    blocks: dict[str, list[Block]] = {}
    losses: dict[str, list[float]] = {name: [] for name in PAIRS}
    for move, (_, world, *_) in enumerate(MOVES):
        results = run_ranks(world, train_each, move, tmp_path, blocks, timeout_s=300)
        blocks = {name: [result[name][2] for result in results] for name in PAIRS}
        for name in PAIRS:
            losses[name] += results[0][name][0]
            expected = expected_training(name)[0][: len(losses[name])]
            assert losses[name] == pytest.approx(expected, rel=1e-9), (name, MOVES[move])
    for name in PAIRS:
        state, (_, expected) = results[0][name][1], expected_training(name)
        errors = {key: zoo.relative_error(state[key], expected[key]) for key in expected}
        assert max(errors.values()) <= 1e-9, (name, errors)
    assert not list(tmp_path.iterdir())  # the files have no names


def test_optimizers_differ_by_more_than_the_tolerance() -> None:
    finals = [expected_training(name)[1]["blocks.1.up.weight"] for name in PAIRS]
    for a, b in combinations(finals, 2):
        assert zoo.relative_error(a, b) > 1e-4
