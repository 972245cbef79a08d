"""Every optimizer gives the same weights with and without offload."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rayzero
from tests.engine import zoo
from tests.engine.offload.training import config, run_steps, separate_host_memory
from tests.support.covering import covering
from tests.support.ranks import run_ranks

KINDS = ["Adam", "AdamW", "SGD", "Adagrad", "Lion", "Lamb", "Muon"]


def train(settings: dict[str, Any], kind: str) -> dict[str, Tensor]:
    params: dict[str, Any] = {"lr": 1e-2} | ({"momentum": 0.9} if kind in ("SGD", "Muon") else {})
    engine, *_ = rayzero.initialize(
        model=zoo.make_model(torch.float64),
        config=settings | {"optimizer": {"type": kind, "params": params}},
    )
    run_steps(engine, range(3))
    state = engine.state_dict()
    engine.close()
    return state


AXES = {"kind": KINDS, "offload": ("cpu", "half", "nvme"), "stage": (0, 3)}


def allowed(row: dict[str, Any]) -> bool:
    """Optimizers that need full parameters do not support NVMe."""
    return row.get("offload") != "nvme" or row.get("kind") not in ("Lamb", "Muon")


ROWS = covering(AXES, 2, allowed)


def max_errors(rank: int, world: int, stage: int, folder: Path) -> dict[str, float]:
    offloads: dict[str, dict[str, Any]] = {
        "cpu": {"device": "cpu"},
        "half": {"device": "cpu", "ratio": 0.5},
        "nvme": {"device": "nvme", "nvme_path": str(folder)},
    }
    reference = cache(lambda kind: train(config(stage), kind))
    errors = {}
    for row in ROWS:
        if row["stage"] != stage:
            continue
        kind, offload = row["kind"], row["offload"]
        expected = reference(kind)
        with separate_host_memory():
            settings = config(stage, offload_optimizer=offloads[offload], sub_group_size=64)
            actual = train(settings, kind)
        errors_by_name = [zoo.relative_error(actual[name], expected[name]) for name in expected]
        errors[f"{kind} {offload}"] = max(errors_by_name, default=0.0)
    return errors


@pytest.mark.parametrize("stage", AXES["stage"])
def test_offload_does_not_change_weights(stage: int, tmp_path: Path) -> None:
    errors = run_ranks(2, max_errors, stage, tmp_path, timeout_s=300)[0]
    assert len(errors) == sum(row["stage"] == stage for row in ROWS)
    assert max(errors.values()) <= 1e-9, errors
