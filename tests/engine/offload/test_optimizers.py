"""Every optimizer of a config gives the same weights with and without offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rayzero
from tests.engine import zoo
from tests.engine.offload.training import config, run_steps, separate_host_memory
from tests.support.ranks import run_ranks

KINDS = ["Adam", "AdamW", "SGD", "Adagrad", "Lion", "Lamb", "Muon"]


def trained(settings: dict[str, Any], kind: str) -> dict[str, Tensor]:
    params: dict[str, Any] = {"lr": 1e-2} | ({"momentum": 0.9} if kind in ("SGD", "Muon") else {})
    engine, *_ = rayzero.initialize(
        model=zoo.make_model(torch.float64),
        config=settings | {"optimizer": {"type": kind, "params": params}},
    )
    run_steps(engine, range(3))
    state = engine.state_dict()
    engine.close()
    return state


def differences(rank: int, world: int, stage: int, folder: Path) -> dict[str, float]:
    found = {}
    for kind in KINDS:
        right = trained(config(stage), kind)
        places: list[dict[str, Any]] = [{"device": "cpu"}, {"device": "cpu", "ratio": 0.5}]
        if kind not in ("Lamb", "Muon"):  # refused: they need whole parameters
            places.append({"device": "nvme", "nvme_path": str(folder)})
        for place in places:
            with separate_host_memory():
                seen = trained(config(stage, offload_optimizer=place, sub_group_size=64), kind)
            worst = [zoo.relative_error(seen[name], right[name]) for name in right]
            found[f"{kind} {place}"] = max(worst, default=0.0)
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_every_optimizer_equals_itself_without_offload(stage: int, tmp_path: Path) -> None:
    found = run_ranks(2, differences, stage, tmp_path, timeout_s=300)[0]
    assert len(found) == 3 * len(KINDS) - 2
    assert max(found.values()) <= 1e-9, found
