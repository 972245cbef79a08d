"""When and in what pieces things travel changes no result: overlap, bucket sizes, nearer shards."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import rayzero
from rayzero.engine.compression.select import hpz_group_size
from rayzero.engine.errors import ConfigError
from rayzero.engine.session import use_session
from tests.engine import zoo
from tests.engine.state.blocks import StateSession
from tests.support.ranks import run_ranks

STEPS, SAMPLES, LIMIT_S = 3, 12, 200.0
Result = list[tuple[list[float], dict[str, Tensor], dict[str, dict[str, int]], dict[str, int]]]


def train(rank: int, world: int, configs: list[dict[str, Any]]) -> Result:
    """One training for each config: losses, model, traffic and bytes."""
    results: Result = []
    for change in configs:
        torch.manual_seed(0)
        model = zoo.make_model(torch.float32)
        elastic = change.pop("elastic", False)
        sizes = {"train_batch_size": SAMPLES, "gradient_accumulation_steps": 2}
        config = sizes | {"gradient_clipping": 0} | change
        with use_session(StateSession() if elastic else None):  # type: ignore[arg-type]
            engine, *_ = rayzero.initialize(
                model=model,
                model_parameters=zoo.two_groups(model),
                optimizer=zoo.adamw,
                config=config,
            )
        losses = []
        for batch in zoo.batches(STEPS, SAMPLES):
            for part in batch.chunk(max(world, 1))[rank].chunk(2):
                engine.backward(engine(part[:, :-1], targets=part[:, 1:])["loss"])
                engine.step()
            losses.append(engine.metrics.loss)
        metrics = engine.metrics
        results.append((losses, engine.state_dict(), metrics.collectives, metrics.bytes))
    return results


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 150} | more}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["none", "sign"])
def test_overlap_changes_no_bit(stage: int, world: int, name: str) -> None:
    coded = {"rayzero": {"compression": {"gradients": name}}}
    configs = [zero(stage, overlap_comm=on) | coded for on in (True, False)]
    for (losses, model, *_), (others, other, *_) in run_ranks(
        world, train, configs, timeout_s=LIMIT_S
    ):
        assert losses == others
        assert same(model, other)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bucket_sizes_change_traffic_and_no_result(stage: int, world: int) -> None:
    sizes = [{"reduce_bucket_size": size} for size in (1, 150, 10**9)]
    sizes.append({"reduce_bucket_size": 10**9, "allgather_bucket_size": 150})
    configs = [zero(stage, **size) for size in sizes]
    for results in run_ranks(world, train, configs, timeout_s=LIMIT_S):
        one_by_one = results[0]
        for losses, model, *_ in results[1:]:
            # Sums of elements are the same; only the norm adds up in another order.
            assert losses == pytest.approx(one_by_one[0], rel=1e-6)
            assert all(zoo.relative_error(model[n], one_by_one[1][n]) < 1e-5 for n in model)
        calls = [
            sum(
                one["calls"]
                for name, one in traffic.items()
                if name in ("all_reduce", "reduce_scatter")
            )
            for _, _, traffic, _ in results
        ]
        assert calls[0] > calls[1] > calls[2]
        assert calls[3] == (calls[2] if stage == 0 else calls[1])


def test_a_second_set_of_shards_keeps_gathers_near() -> None:
    configs = [zero(3), zero(3, zero_hpz_partition_size=2), zero(3, zero_hpz_partition_size=4)]
    for far, near, all_near in run_ranks(4, train, configs, timeout_s=LIMIT_S):
        assert far[0] == near[0] == all_near[0]
        assert same(far[1], near[1])
        assert same(far[1], all_near[1])
        once = near[2]["all_gather"]
        # Every unit comes from all ranks once a step; all else stays in the group.
        assert once["bytes"] < 0.6 * far[2]["all_gather"]["bytes"]
        assert once["calls"] % STEPS == 0
        assert (
            once["calls"] + near[2]["all_gather_in_group"]["calls"]
            == (far[2]["all_gather"]["calls"])
        )
        whole = far[3]["model_weights"] * 4  # all ranks' shards together
        assert near[3]["second_shards"] == whole / 2
        assert all_near[3]["second_shards"] == whole / 4
        assert far[3]["second_shards"] == 0


def test_coded_weights_are_equal_everywhere_and_nearly_right() -> None:
    configs = [
        zero(3),
        zero(3, zero_quantized_weights=True),
        zero(3, zero_quantized_weights=True, zero_hpz_partition_size=2),
        zero(3, zero_quantized_weights=True) | {"bf16": {"enabled": True}},
    ]
    results = run_ranks(2, train, configs, timeout_s=LIMIT_S)
    for plain, coded, near, half in results:
        assert plain[0] != coded[0]
        assert coded[0] == pytest.approx(plain[0], rel=0.02)
        assert near[0] == coded[0]
        assert half[0] == pytest.approx(plain[0], rel=0.05)
        bits = 8 * coded[2]["all_gather"]["bytes"] / plain[2]["all_gather"]["bytes"] * 4
        assert 8 < bits < 9.5
    assert results[0][1][0] == results[1][1][0]


def test_a_group_is_as_large_as_it_can_be_in_an_elastic_world(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert hpz_group_size(2, 4, elastic=False) == 2
    assert hpz_group_size(0, 4, elastic=False) == hpz_group_size(1, 3, elastic=False) == 1
    with caplog.at_level(logging.WARNING, "rayzero.engine"):
        assert hpz_group_size(4, 6, elastic=True) == 3
        assert hpz_group_size(2, 3, elastic=True) == 1
    assert "zero_hpz_partition_size 4 does not divide the world size 6: 3 is used" in caplog.text
    with pytest.raises(ConfigError, match="divides the world size: 1, 2, 3, 6"):
        hpz_group_size(4, 6, elastic=False)


def refused(rank: int, world: int, config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as told:
        rayzero.initialize(model=zoo.make_model(torch.float32), optimizer=zoo.adamw, config=config)
    return str(told.value)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (zero(2, zero_quantized_weights=True), "every rank holds all weights"),
        (zero(1, zero_hpz_partition_size=2), "every rank holds all weights"),
        (zero(3, zero_hpz_partition_size=3), "what divides the world size: 1, 2"),
        (
            zero(3, zero_hpz_partition_size=2, offload_param={"device": "cpu"}),
            "together with offload_param",
        ),
    ],
)
def test_what_cannot_be_is_refused(config: dict[str, Any], told: str) -> None:
    assert told in run_ranks(2, refused, config)[0]
