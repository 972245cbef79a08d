"""Training with compressed gradients: equal bits on all ranks, nothing lost, all counted."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero.engine.errors import ConfigError
from rayzero.engine.session import use_session
from tests.engine import zoo
from tests.engine.state.blocks import Block, StateSession
from tests.support.ranks import RankError
from tests.support.ranks import run_ranks as run_ranks_in_time

STEPS, SAMPLES, LR = 5, 12, 0.1
LIMIT_S = 200  # of a call: many small exchanges are slow on a busy machine
run_ranks = partial(run_ranks_in_time, timeout_s=LIMIT_S)
SGD = {"type": "SGD", "params": {"lr": LR}}


def compressed(stage: int, name: str, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "gradient_clipping": 0,
        "train_batch_size": SAMPLES,
        "optimizer": SGD,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 150},
        "rayzero": {"compression": {"gradients": name, "block_size": 32, "rank": 2}},
    }
    return config | more


def train(rank: int, world: int, stage: int, config: dict[str, Any]) -> tuple[Any, ...]:
    """(losses, this rank's model weights, the whole model, traffic)"""
    torch.manual_seed(0)
    model = zoo.make_model(torch.float32)
    engine, *_ = rayzero.initialize(
        model=model, model_parameters=zoo.two_groups(model), config=config
    )
    micro_steps = config.get("gradient_accumulation_steps", 1)
    losses = []
    for batch in zoo.batches(STEPS, SAMPLES):
        for part in batch.chunk(max(world, 1))[rank].chunk(micro_steps):
            engine.backward(engine(part[:, :-1], targets=part[:, 1:])["loss"])
            engine.step()
        losses.append(engine.metrics.loss)
    local = {} if stage == 3 else {n: p.detach().clone() for n, p in model.named_parameters()}
    return losses, local, engine.state_dict(), engine.metrics.collectives


_plain: list[Any] = []


def plain() -> list[float]:
    if not _plain:
        config = compressed(0, "none")
        _plain.extend(run_ranks(0, train, 0, config)[0][0])
    return _plain


NAMES = {"bf16": 1e-3, "fp16": 1e-3, "int8": 2e-3, "sign": 0.6, "lowrank": 0.5}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_get_the_same_bits_near_the_uncompressed_result(
    name: str, stage: int, world: int
) -> None:
    results = run_ranks(world, train, stage, compressed(stage, name))
    for losses, local, _, traffic in results:
        assert losses == results[0][0]
        assert all(torch.equal(local[one], results[0][1][one]) for one in local)
        assert losses == pytest.approx(plain(), rel=NAMES[name])
        assert losses[-1] < 0.5 * losses[0]
        assert "reduce_scatter" not in traffic
        assert name == "lowrank" or "all_reduce" not in traffic


@pytest.mark.parametrize("stage", [1, 2])
def test_accumulation(stage: int) -> None:
    config = compressed(stage, "int8", gradient_accumulation_steps=2)
    for losses, _, _, traffic in run_ranks(2, train, stage, config):
        assert losses == pytest.approx(plain(), rel=2e-3)
        per_step = {1: 1, 2: 2}[stage]
        assert traffic["all_to_all"]["calls"] % (per_step * STEPS) == 0


class Drift(nn.Module):
    """Its loss is linear in its weights, so that gradients do not depend on earlier steps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Slope(7, 5), Slope(33, 1), Slope(40, 3)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum()


class Slope(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))
        self.bias = nn.Parameter(torch.zeros(columns))

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, 200), of which a prefix is used."""
        flat = torch.cat((self.weight.reshape(-1), self.bias))
        return (x[:, : flat.numel()] * flat).sum(1)


def drift_data(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(-4, 5, (SAMPLES, 200), generator=generator).float()  # exact in bf16


def drift(
    rank: int, world: int, config: dict[str, Any], steps: range, blocks: list[Block] | None
) -> tuple[Block, dict[str, Tensor], int]:
    with use_session(StateSession(blocks)):
        engine, *_ = rayzero.initialize(model=Drift(), config=config)
    for step in steps:
        engine.backward(engine(drift_data(step).chunk(max(world, 1))[rank]))
        engine.step()
    return Block.of(engine), engine.state_dict(), engine.metrics.bytes["error_feedback"]


def residuals_by_param(blocks: list[Block]) -> dict[str, Tensor]:
    """The ranks' residuals of each parameter, summed, in units of the mean gradient."""
    found: dict[str, Tensor] = {}
    for block in blocks:
        factor = json.loads(block.small)["residual_factor"]
        for one in block.table.ranges:
            kind, _, name = one.name.partition("/")
            if kind.startswith("residual."):
                logical = block.table.tensors[one.name]
                total = found.setdefault(name, torch.zeros(logical.numel))
                count = one.stop - one.start
                values = torch.frombuffer(
                    block.data, dtype=torch.float32, count=count, offset=one.offset
                )
                total[one.start : one.stop] += factor * values
    return found


PRECISIONS: dict[str, Any] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    # The scale rises every fourth step, and residuals with it.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 0, "loss_scale_window": 4}},
}
CHAIN = [(0, 2), (0, 3), (1, 2), (3, 3), (2, 2), (0, 0), (2, 3), (3, 0), (0, 2), (0, 2)]


@pytest.mark.parametrize(
    ("name", "precision"),
    [*product(("sign", "int8", "lowrank"), ("fp32", "fp16")), ("sign", "bf16")],
)
def test_residuals_survive_changes_of_stage_and_world_size(name: str, precision: str) -> None:
    blocks, last, gradient = None, 0, torch.zeros(200)
    for stage, world in CHAIN:
        config = compressed(stage, name, **PRECISIONS[precision])
        config["rayzero"]["compression"]["error_feedback"] = True
        steps = range(last, last + 2)
        results = run_ranks(world, drift, config, steps, blocks)
        blocks, last = [one[0] for one in results], last + 2
        # Applied gradients moved the weights, the rest are residuals.
        gradient += sum(drift_data(step).sum(0) for step in steps) / max(world, 1)
        kept = residuals_by_param(blocks)
        weights = results[0][1] if precision == "fp32" else main_weights(blocks)
        assert results[0][2] > 0
        for number, block in enumerate(Drift().blocks):
            start = 0
            for one in ("weight", "bias"):
                key = f"blocks.{number}.{one}"
                numel = getattr(block, one).numel()
                right = gradient[start : start + numel]
                seen = weights[key].reshape(-1) / -LR + kept[key]
                torch.testing.assert_close(seen, right, atol=2e-4, rtol=1e-4)
                start += numel
        assert max(float(one.abs().max()) for one in kept.values()) > 1e-3
    if precision == "fp16":
        assert json.loads(blocks[0].small)["loss_scale"]["value"] == 2.0**4


def main_weights(blocks: list[Block]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for block in blocks:
        for one in block.table.ranges:
            kind, _, name = one.name.partition("/")
            if kind == "weights":
                whole = found.setdefault(name, torch.zeros(block.table.tensors[one.name].numel))
                count = one.stop - one.start
                whole[one.start : one.stop] = torch.frombuffer(
                    block.data, dtype=torch.float32, count=count, offset=one.offset
                )
    return found


@pytest.mark.parametrize("name", ["sign", "lowrank"])
@pytest.mark.parametrize("stage", [0, 2])
def test_resumes_with_the_same_bits(stage: int, name: str) -> None:
    config = compressed(stage, name)
    straight = run_ranks(2, drift, config, range(4), None)
    first = run_ranks(2, drift, config, range(2), None)
    second = run_ranks(2, drift, config, range(2, 4), [one[0] for one in first])
    for one, other in zip(straight, second, strict=True):
        assert one[0].data == other[0].data


def test_dropped_residuals_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    blocks = [run_ranks(0, drift, compressed(0, "sign"), range(2), None)[0][0]]
    with caplog.at_level("WARNING", "rayzero.engine"):
        drift(0, 0, compressed(0, "none"), range(2, 3), blocks)
    assert "which are dropped" in caplog.text


def skipped(rank: int, world: int, stage: int, name: str) -> tuple[int, float, float]:
    engine, *_ = rayzero.initialize(model=Drift(), config=compressed(stage, name))
    for step in range(4):
        data = drift_data(step).chunk(world)[rank].clone()
        if step == 2 and rank == 1:
            data[0, 3] = float("inf")
        engine.backward(engine(data))
        engine.step()
        if step == 1:
            before = feedback_size(engine)
    return engine.metrics.skipped_steps, before, feedback_size(engine)


def feedback_size(engine: rayzero.Engine) -> float:
    kept = engine._runtime.grad_reduction.residuals
    return float(sum(one.local.abs().sum() for one in kept))


@pytest.mark.parametrize("name", ["sign", "lowrank"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_skipped_step_discards_residuals(stage: int, name: str) -> None:
    for count, before, after in run_ranks(2, skipped, stage, name):
        assert count == 1
        assert before > 0
        assert 0 < after < float("inf")


def refused(rank: int, world: int, config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as message:
        rayzero.initialize(
            model=Drift().to(config.pop("model_dtype", torch.float32)), config=config
        )
    return str(message.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"communication_data_type": "fp16"},
            "rayzero.compression.gradients is sign, communication_data_type",
        ),
        (
            {"rayzero": {"compression": {"gradients": "sign", "error_feedback": False}}},
            "does not converge",
        ),
        ({"rayzero": {"compression": {"gradients": "int4"}}}, "rayzero.compression.gradients"),
        ({"rayzero": {"compression": {"block_size": 33}}}, "multiple of 32"),
        ({"model_dtype": torch.bfloat16}, "main gradients in fp32"),
    ],
)
def test_unsupported_combinations_are_refused(change: dict[str, Any], message: str) -> None:
    assert message in run_ranks(0, refused, compressed(0, "sign") | change)[0]


def test_bytes_are_those_of_the_payloads() -> None:
    traffic = {name: run_ranks(2, train, 2, compressed(2, name))[0][3] for name in ("none", *NAMES)}
    plain_bytes = traffic["none"]["reduce_scatter"]["bytes"]
    assert traffic["lowrank"]["all_reduce"]["bytes"] < 1.5 * plain_bytes  # the model is tiny
    share = {
        name: traffic[name]["all_to_all"]["bytes"] / plain_bytes
        for name in NAMES
        if name != "lowrank"
    }
    assert share["bf16"] == share["fp16"] == 0.5
    assert 0.25 < share["int8"] < 0.3  # a scale for every 32 values
    assert 1 / 32 < share["sign"] < 0.08


def test_deepspeeds_keys_select_the_same() -> None:
    config = compressed(2, "none")
    cast = run_ranks(2, train, 2, config | {"communication_data_type": "bf16"})
    assert cast[0][0] == run_ranks(2, train, 2, compressed(2, "bf16"))[0][0]
    config["zero_optimization"]["zero_quantized_gradients"] = True
    assert run_ranks(2, train, 2, config)[0][3]["all_to_all"]["bytes"] > 0


def test_a_missing_rank_is_an_error() -> None:
    with pytest.raises(RankError):
        run_ranks_in_time(2, leaves, timeout_s=30)


def leaves(rank: int, world: int) -> None:
    engine, *_ = rayzero.initialize(model=Drift(), config=compressed(0, "int8"))
    if rank == 1:
        raise RuntimeError("gone")
    engine.backward(engine(drift_data(0).chunk(world)[rank]))
    engine.step()


def saves(rank: int, world: int, folder: str) -> None:
    engine, *_ = rayzero.initialize(model=Drift(), config=compressed(0, "sign"))
    for step in range(2):
        engine.backward(engine(drift_data(step).chunk(world)[rank]))
        engine.step()
    engine.save_checkpoint(folder)


def loads(rank: int, world: int, folder: str) -> tuple[Block, dict[str, Tensor]]:
    engine, *_ = rayzero.initialize(model=Drift(), config=compressed(2, "sign"))
    engine.load_checkpoint(folder)
    return Block.of(engine), engine.state_dict()


def test_a_checkpoint_has_residuals(tmp_path: Path) -> None:
    run_ranks(2, saves, str(tmp_path))
    results = run_ranks(3, loads, str(tmp_path))
    kept, model = residuals_by_param([one[0] for one in results]), results[0][1]
    gradient = sum(drift_data(step).sum(0) for step in range(2)) / 2
    assert max(float(one.abs().max()) for one in kept.values()) > 0.01
    for number, block in enumerate(Drift().blocks):
        numel = block.weight.numel()
        key = f"blocks.{number}.weight"
        seen = model[key].reshape(-1) / -LR + kept[key]
        torch.testing.assert_close(seen, gradient[:numel], atol=2e-4, rtol=1e-4)
