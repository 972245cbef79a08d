"""Communication settings do not change results: bucket sizes, secondary shards."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import rayzero
from rayzero.engine.compression.weights import hpz_group_size
from rayzero.engine.errors import ConfigError
from rayzero.engine.session import use_session
from tests.engine import zoo
from tests.engine.state.blocks import StateSession
from tests.support.ranks import run_ranks

STEPS, SAMPLES, LIMIT_S = 3, 12, 200.0
TrainResult = tuple[
    list[float], dict[str, Tensor], dict[str, dict[str, int]], dict[str, int]
]  # losses, state dict, collectives, bytes


def train(rank: int, world: int, configs: list[dict[str, Any]]) -> list[TrainResult]:
    """Train once with each config."""
    results: list[TrainResult] = []
    for overrides in configs:
        torch.manual_seed(0)
        model = zoo.make_model(torch.float32)
        elastic = overrides.pop("elastic", False)
        sizes = {"train_batch_size": SAMPLES, "gradient_accumulation_steps": 2}
        config = sizes | {"gradient_clipping": 0} | overrides
        with use_session(StateSession() if elastic else None):  # type: ignore[arg-type]
            engine, *_ = rayzero.initialize(
                model=model,
                model_parameters=zoo.two_groups(model),
                optimizer=zoo.adamw,
                config=config,
            )
        losses = zoo.train(engine, zoo.batches(STEPS, SAMPLES), 2)
        metrics = engine.metrics
        results.append((losses, engine.state_dict(), metrics.collectives, metrics.bytes))
    return results


def zero_config(stage: int, **overrides: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 150} | overrides}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 3), (2, 2)])
def test_bucket_sizes_only_change_traffic(stage: int, world: int) -> None:
    sizes = [{"reduce_bucket_size": size} for size in (1, 150, 10**9)]
    sizes.append({"reduce_bucket_size": 10**9, "allgather_bucket_size": 150})
    configs = [zero_config(stage, **size) for size in sizes]
    for results in run_ranks(world, train, configs, timeout_s=LIMIT_S):
        expected_losses, expected, *_ = results[0]
        for losses, model, *_ in results[1:]:
            # Elements are summed in the same order; only the norm is not.
            assert losses == pytest.approx(expected_losses, rel=1e-6)
            assert all(zoo.relative_error(model[n], expected[n]) < 1e-5 for n in model)
        calls = [
            sum(
                counts["calls"]
                for name, counts in traffic.items()
                if name in ("all_reduce", "reduce_scatter")
            )
            for _, _, traffic, _ in results
        ]
        assert calls[0] > calls[1] > calls[2]
        assert calls[3] == (calls[2] if stage == 0 else calls[1])


def test_secondary_shards_gather_within_group() -> None:
    configs = [
        zero_config(3),
        zero_config(3, zero_hpz_partition_size=2),
        zero_config(3, zero_hpz_partition_size=4),
    ]
    for full, groups_of_2, groups_of_4 in run_ranks(4, train, configs, timeout_s=LIMIT_S):
        assert full[0] == groups_of_2[0] == groups_of_4[0]
        assert equal(full[1], groups_of_2[1])
        assert equal(full[1], groups_of_4[1])
        gathers = groups_of_2[2]
        # Every unit is gathered from all ranks once a step, otherwise within the group.
        assert gathers["all_gather"]["bytes"] < 0.6 * full[2]["all_gather"]["bytes"]
        assert gathers["all_gather"]["calls"] % STEPS == 0
        assert (
            gathers["all_gather"]["calls"] + gathers["all_gather_in_group"]["calls"]
            == full[2]["all_gather"]["calls"]
        )
        total = full[3]["model_weights"] * 4  # of all ranks' shards
        assert groups_of_2[3]["second_shards"] == total / 2
        assert groups_of_4[3]["second_shards"] == total / 4
        assert full[3]["second_shards"] == 0


def test_quantized_weights_are_equal_on_all_ranks() -> None:
    configs = [
        zero_config(3),
        zero_config(3, zero_quantized_weights=True),
        zero_config(3, zero_quantized_weights=True, zero_hpz_partition_size=2),
        zero_config(3, zero_quantized_weights=True) | {"bf16": {"enabled": True}},
    ]
    results = run_ranks(2, train, configs, timeout_s=LIMIT_S)
    for fp32, quantized, in_groups, bf16 in results:
        assert fp32[0] != quantized[0]
        assert quantized[0] == pytest.approx(fp32[0], rel=0.02)
        assert in_groups[0] == quantized[0]
        assert bf16[0] == pytest.approx(fp32[0], rel=0.05)
        bits = 8 * quantized[2]["all_gather"]["bytes"] / fp32[2]["all_gather"]["bytes"] * 4
        assert 8 < bits < 9.5
    assert results[0][1][0] == results[1][1][0]


def test_elastic_job_uses_largest_valid_group_size(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert hpz_group_size(2, 4, elastic=False) == 2
    assert hpz_group_size(0, 4, elastic=False) == hpz_group_size(1, 3, elastic=False) == 1
    with caplog.at_level(logging.WARNING, "rayzero.engine"):
        assert hpz_group_size(4, 6, elastic=True) == 3
        assert hpz_group_size(2, 3, elastic=True) == 1
    assert "zero_hpz_partition_size 4 does not divide the world size 6: 3 is used" in caplog.text
    with pytest.raises(ConfigError, match="what divides the world size: 1, 2, 3, 6"):
        hpz_group_size(4, 6, elastic=False)
