"""The chart refuses the engine config's keys that the parser refuses, which is the oracle."""

from __future__ import annotations

import re
from typing import Any

import helm_python
import pytest

from rayzero.engine.config.checks import find_refused
from tests.deploy.chart import render, render_text

ENGINES: list[dict[str, Any]] = [
    {"flops_profiler": {"enabled": True}},
    {"flops_profiler": {"enabled": False, "profile_step": 1}, "amp": {"enabled": "false"}},
    {"nebula": {"persistent_storage_path": "/a"}},
    {"nebula": {"enabled": False}, "sparse_gradients": False, "sequence_parallel_size": 1},
    {"elasticity": {"enabled": True, "max_train_batch_size": 64}},
    {"sparse_gradients": True},
    {"sequence_parallel_size": 2},
    {"zero_optimization": {"mics_shard_size": 8}},
    {"zero_optimization": {"mics_shard_size": -1, "zenflow": None}},
    {"zero_optimization": {"offload_optimizer": {"device": "none", "super_offload": True}}},
    {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
    {"fp16": {"enabled": False, "fp16_master_weights_and_grads": True}},
    {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
    {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "max_grad_norm": 1.0}}},
    {"data_types": {"keep_in_fp32_modules": "auto"}, "autotuning": {"mp_size": 2}},
]


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_refused_keys(engine: dict[str, Any]) -> None:
    values = {"job": {"engine": engine}}
    refused = [line.partition(":")[0] for line in find_refused(engine)]
    if not refused:
        assert render(values)
        return
    with pytest.raises(helm_python.HelmError) as caught:
        render_text(values)
    assert f"job.engine.{refused[0]}: refused: " in str(caught.value)
    assert re.search(r"\(seen: .+\)", str(caught.value))


@pytest.mark.parametrize("fp16", [True, {"enabled": True}])
def test_two_precisions(fp16: Any) -> None:
    engine = {"fp16": fp16, "bf16": {"enabled": True}}
    with pytest.raises(
        helm_python.HelmError, match=r"job\.engine\.fp16\.enabled, .* set one to false"
    ):
        render_text({"job": {"engine": engine}})
    assert render({"job": {"engine": engine | {"bf16": {"enabled": False}}}})
