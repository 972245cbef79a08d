"""Loads a checkpoint that an earlier release wrote: `released.zip`, format version 1."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

import rayzero
from rayzero.engine.checkpoint.verify import verify_checkpoint
from tests.engine.checkpoint.make_released import CLIENT_STATE, CONFIG, STEPS, Model, batch
from tests.support.ranks import run_ranks

ARCHIVE = Path(__file__).with_name("released.zip")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def load_and_train(rank: int, world_size: int, stage: int, folder: Path) -> None:
    config = CONFIG | {"zero_optimization": {"stage": stage}}
    engine, *_ = rayzero.initialize(model=Model(), config=config)
    _, client_state = engine.load_checkpoint(str(folder))
    expected = json.loads((folder / "expected.json").read_text())
    assert client_state == CLIENT_STATE
    assert engine.global_steps == expected["step"] == STEPS
    assert engine.loss_scale == expected["loss_scale"]
    assert engine.get_lr() == expected["lr"]
    weights = engine.state_dict()
    if rank == 0:
        assert weights.keys() == expected["weights"].keys()
        for name, values in expected["weights"].items():
            assert weights[name].tolist() == values, name
    engine.backward(engine(batch(STEPS, rank, world_size)))
    engine.step()
    assert engine.global_steps == STEPS + 1
    engine.close()


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 2), (2, 3)])
def test_checkpoint_of_earlier_release_loads(folder: Path, world_size: int, stage: int) -> None:
    run_ranks(world_size, load_and_train, stage, folder)


def test_checkpoint_of_earlier_release_verifies(folder: Path) -> None:
    assert verify_checkpoint(str(folder / "released")) == []
