"""`EngineWeightSource`: what a real engine yields at every stage, compared with plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero.engine.errors import EngineError
from rayzero.engine.zero.parameters import ShardedWeights
from tests.engine import zoo
from tests.support.ranks import run_ranks
from tests.vllm import stand_in

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def make_source(engine: Any, *arguments: Any) -> Any:
    with stand_in.installed():
        from rayzero.vllm.weight_source import EngineWeightSource
    return EngineWeightSource(engine, *arguments)


def train_both(
    rank: int, world: int, stage: int, more: dict[str, Any], steps: int
) -> tuple[Any, nn.Module]:
    """An engine and a plain model after the same steps."""
    plain = zoo.make_model(torch.float64)
    optimizer = torch.optim.SGD([it for it in plain.parameters() if it.requires_grad], 0.1)
    config = {
        "train_batch_size": 12,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, **more},
    }
    engine, *_ = rayzero.initialize(model=zoo.make_model(torch.float64), config=config)
    for batch in zoo.batches(steps, 12):
        part = batch.chunk(world)[rank]
        engine.backward(engine(part[:, :-1], targets=part[:, 1:])["loss"])
        engine.step()
        optimizer.zero_grad()
        plain(batch[:, :-1], batch[:, 1:])["loss"].backward()
        optimizer.step()
    return engine, plain


def check_source(rank: int, world: int, stage: int, more: dict[str, Any]) -> None:
    engine, plain = train_both(rank, world, stage, more, 2)
    source = make_source(engine)
    expected = dict(plain.named_parameters())
    for _ in range(2):  # each pass is a fresh one
        yielded = [(name, value.clone()) for name, value in source]
        assert [(it.name, it.dtype, it.shape) for it in source.metadata()] == [
            (name, value.dtype, tuple(value.shape)) for name, value in yielded
        ]
        assert [name for name, _ in yielded] == list(expected)
        for name, value in yielded:
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-9, atol=1e-12)
    # It trains on.
    for batch in zoo.batches(1, 12, seed=9):
        part = batch.chunk(world)[rank]
        loss = engine(part[:, :-1], targets=part[:, 1:])["loss"]
        whole = plain(batch[:, :-1], batch[:, 1:])["loss"]
        engine.backward(loss)
        engine.step()
        assert engine.metrics.loss == pytest.approx(whole.item(), rel=1e-9)


@STAGES
def test_every_rank_yields_the_models_parameters(stage: int) -> None:
    run_ranks(3, check_source, stage, {})


def test_offloaded_parameters_are_yielded() -> None:
    run_ranks(2, check_source, 3, {"offload_param": {"device": "cpu"}})


def peak_units(rank: int, world: int) -> tuple[int, int]:
    """The most elements that were gathered at the same time, and the model's."""
    torch.manual_seed(0)
    model = nn.Sequential(*(zoo.ResidualBlock(8) for _ in range(6)))
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    engine, *_ = rayzero.initialize(model=model, config=config | {"optimizer": {"type": "Adam"}})
    storages: dict[int, Any] = {}
    peak = 0
    for _, value in make_source(engine):
        storages[id(value.untyped_storage())] = torch.multiprocessing.reductions.StorageWeakRef(
            value.untyped_storage()
        )
        del value
        alive = [it for it in storages.values() if not it.expired()]
        peak = max(peak, len(alive))
    sharded = sum(isinstance(it.weights, ShardedWeights) for it in engine.internals.runtime.units)
    return peak, sharded


def test_one_unit_is_gathered_at_a_time() -> None:
    for peak, units in run_ranks(2, peak_units):
        assert units >= 6
        assert peak <= 2


def cast(rank: int, world: int) -> tuple[list[Any], list[Tensor]]:
    engine, plain = train_both(rank, world, 3, {}, 1)
    source = make_source(engine, torch.bfloat16)
    assert {it.dtype for it in source.metadata()} == {torch.bfloat16}
    for (_, value), param in zip(source, plain.parameters(), strict=True):
        torch.testing.assert_close(value, param.detach().to(torch.bfloat16), rtol=0.01, atol=1e-3)


def test_values_are_cast_to_the_dtype_that_is_served() -> None:
    run_ranks(2, cast)


def refused(rank: int, world: int) -> str:
    engine, *_ = rayzero.initialize(model=nn.Linear(2, 2))
    param = engine.module.weight
    param.quant_state = object()
    with pytest.raises(EngineError) as error:
        make_source(engine)
    return str(error.value)


def test_quantized_parameters_are_refused_by_name() -> None:
    (text,) = run_ranks(1, refused)
    assert "weight is quantized" in text
    assert "fix: load the model without quantization_config" in text
