"""Every optimizer equals plain PyTorch at every stage and world size, and when they change."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import rayzero
from rayzero.engine.session import use_session
from tests.engine import zoo
from tests.engine.optim.references import PAIRS
from tests.engine.state.blocks import Block, StateSession
from tests.support.covering import covering
from tests.support.ranks import run_ranks

STEPS, SAMPLES, CLIP = 3, 12, 0.5
TIMEOUT_S = 300.0  # many short training runs, possibly on a busy machine
TrainResult = tuple[list[float], dict[str, Tensor]]


def train(
    rank: int, world: int, name: str, stage: int, steps: range, blocks: list[Block] | None = None
) -> tuple[list[float], dict[str, Tensor], Block]:
    model = zoo.make_model(torch.float64, seed=rank + steps.start)
    with use_session(StateSession(blocks)):
        engine, *_ = rayzero.initialize(
            model=model,
            model_parameters=zoo.two_groups(model),
            config={
                "train_batch_size": SAMPLES,
                "gradient_clipping": CLIP,
                "optimizer": PAIRS[name][0],
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 150},
            },
        )
    losses = zoo.train(engine, list(zoo.batches(steps.stop, SAMPLES))[steps.start :])
    return losses, engine.state_dict(), Block.of(engine)


def train_each(rank: int, world: int, stage: int, names: list[str]) -> dict[str, TrainResult]:
    """Train with all optimizers in one call, because starting ranks is slow."""
    return {name: train(rank, world, name, stage, range(STEPS))[:2] for name in names}


@cache
def expected_training(name: str, steps: int) -> TrainResult:
    make: Any = PAIRS[name][1]
    return zoo.train_reference(
        zoo.make_model(torch.float64), make, list(zoo.batches(steps, SAMPLES)), CLIP
    )


def check(name: str, losses: list[float], state: dict[str, Tensor]) -> None:
    expected_losses, expected = expected_training(name, len(losses))
    assert losses == pytest.approx(expected_losses, rel=1e-9), name
    errors = {key: zoo.relative_error(state[key], expected[key]) for key in expected}
    assert max(errors.values()) <= 1e-9, (name, errors)


AXES = {"stage": (0, 1, 2, 3), "world": (0, 1, 2, 3)}
ROWS = covering(AXES | {"name": tuple(PAIRS)}, 2)
# They need full parameters, so sharding matters most for them.
ALWAYS_TESTED = [name for name in PAIRS if name.lower().startswith(("lamb", "muon"))]


@pytest.mark.parametrize("stage", AXES["stage"])
@pytest.mark.parametrize("world", AXES["world"])
def test_equals_pytorch(world: int, stage: int) -> None:
    selected = [row["name"] for row in ROWS if (row["stage"], row["world"]) == (stage, world)]
    names = list(dict.fromkeys([*selected, *ALWAYS_TESTED]))
    results = run_ranks(world, train_each, stage, names, timeout_s=TIMEOUT_S)
    assert list(results[0]) == names
    for name, (losses, state) in results[0].items():
        check(name, losses, state)


STAGES_AND_WORLDS = [(3, 3), (1, 2), (0, 0), (2, 3), (0, 2), (3, 2)]


def train_one_step(
    rank: int, world: int, stage: int, step: int, blocks: dict[str, list[Block]]
) -> dict[str, tuple[list[float], dict[str, Tensor], Block]]:
    return {
        name: train(rank, world, name, stage, range(step, step + 1), blocks.get(name))
        for name in PAIRS
    }


def test_resume_at_other_stages_and_world_sizes() -> None:
    """Every step resumes from the previous one at another stage and world size."""
    blocks: dict[str, list[Block]] = {}
    losses: dict[str, list[float]] = {name: [] for name in PAIRS}
    for step, (stage, world) in enumerate(STAGES_AND_WORLDS):
        results = run_ranks(world, train_one_step, stage, step, blocks, timeout_s=TIMEOUT_S)
        blocks = {name: [result[name][2] for result in results] for name in PAIRS}
        for name in PAIRS:
            losses[name] += results[0][name][0]
    for name in PAIRS:
        check(name, losses[name], results[0][name][1])


def test_optimizers_differ_by_more_than_the_tolerance() -> None:
    finals = [expected_training(name, STEPS)[1]["blocks.1.up.weight"] for name in PAIRS]
    for a, b in combinations(finals, 2):
        assert zoo.relative_error(a, b) > 1e-4
