"""Training with compressed gradients: equality of ranks, error feedback, traffic."""

from __future__ import annotations

import json
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero.engine.errors import ConfigError
from rayzero.engine.session import use_session
from tests.engine import zoo
from tests.engine.state.blocks import Block, StateSession
from tests.support.covering import covering
from tests.support.ranks import run_ranks as run_ranks_in_time

STEPS, SAMPLES, LR = 5, 12, 0.1
LIMIT_S = 200  # many small exchanges are slow on a busy machine
run_ranks = partial(run_ranks_in_time, timeout_s=LIMIT_S)
SGD = {"type": "SGD", "params": {"lr": LR}}


def compression_config(stage: int, name: str, **overrides: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "gradient_clipping": 0,
        "train_batch_size": SAMPLES,
        "optimizer": SGD,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 150},
        "rayzero": {"compression": {"gradients": name, "block_size": 32, "rank": 2}},
    }
    return config | overrides


def train(rank: int, world: int, stage: int, config: dict[str, Any]) -> tuple[Any, ...]:
    """Returns losses, this rank's weights, the full state dict and collectives."""
    torch.manual_seed(0)
    model = zoo.make_model(torch.float32)
    engine, *_ = rayzero.initialize(
        model=model, model_parameters=zoo.two_groups(model), config=config
    )
    micro_steps = config.get("gradient_accumulation_steps", 1)
    losses = zoo.train(engine, zoo.batches(STEPS, SAMPLES), micro_steps)
    local = {} if stage == 3 else {n: p.detach().clone() for n, p in model.named_parameters()}
    return losses, local, engine.state_dict(), engine.metrics.collectives


@cache
def uncompressed_losses() -> list[float]:
    return run_ranks(0, train, 0, compression_config(0, "none"))[0][0]


TOLERANCES = {"bf16": 1e-3, "fp16": 1e-3, "int8": 2e-3, "sign": 0.6, "lowrank": 0.5}


AXES = {
    "name": tuple(TOLERANCES),
    "stage": (0, 1, 2, 3),
    "world": (2, 3),
    "overlap": (True, False),
    "micro_steps": (1, 2),
}


@pytest.mark.parametrize(
    tuple(AXES), [tuple(row[axis] for axis in AXES) for row in covering(AXES, 2)]
)
def test_ranks_agree_and_stay_close_to_uncompressed(
    name: str, stage: int, world: int, overlap: bool, micro_steps: int
) -> None:
    config = compression_config(stage, name, gradient_accumulation_steps=micro_steps)
    config["zero_optimization"]["overlap_comm"] = overlap
    results = run_ranks(world, train, stage, config)
    for losses, local, _, traffic in results:
        assert losses == results[0][0]
        assert all(torch.equal(local[key], results[0][1][key]) for key in local)
        assert losses == pytest.approx(uncompressed_losses(), rel=TOLERANCES[name])
        assert losses[-1] < 0.5 * losses[0]
        assert "reduce_scatter" not in traffic
        assert name == "lowrank" or "all_reduce" not in traffic


class LinearLossModel(nn.Module):
    """The loss is linear in the weights, so gradients do not depend on earlier steps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [LinearLossBlock(7, 5), LinearLossBlock(33, 1), LinearLossBlock(40, 3)]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum()


class LinearLossBlock(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))
        self.bias = nn.Parameter(torch.zeros(columns))

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, 200), of which the first `numel` columns are used."""
        flat = torch.cat((self.weight.reshape(-1), self.bias))
        return (x[:, : flat.numel()] * flat).sum(1)


def make_batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(-4, 5, (SAMPLES, 200), generator=generator).float()  # exact in bf16


def train_linear(
    rank: int, world: int, config: dict[str, Any], steps: range, blocks: list[Block] | None
) -> tuple[Block, dict[str, Tensor], int]:
    with use_session(StateSession(blocks)):
        engine, *_ = rayzero.initialize(model=LinearLossModel(), config=config)
    for step in steps:
        engine.backward(engine(make_batch(step).chunk(max(world, 1))[rank]))
        engine.step()
    return Block.of(engine), engine.state_dict(), engine.metrics.bytes["error_feedback"]


def sums_by_param(blocks: list[Block], kind: str) -> dict[str, Tensor]:
    """The ranks' ranges of a kind by parameter; residuals in units of the mean gradient."""
    sums: dict[str, Tensor] = {}
    for block in blocks:
        factor = json.loads(block.metadata)["residual_factor"] if kind == "residual" else 1
        for part in block.index.ranges:
            found, _, name = part.name.partition("/")
            if found.startswith(kind):
                total = sums.setdefault(name, torch.zeros(block.index.tensors[part.name].numel))
                values = torch.frombuffer(
                    block.data,
                    dtype=torch.float32,
                    count=part.stop - part.start,
                    offset=part.offset,
                )
                total[part.start : part.stop] += factor * values
    return sums


PRECISIONS: dict[str, Any] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    # The loss scale grows, and residuals with it.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 0, "loss_scale_window": 4}},
}
STAGES_AND_WORLDS = [(0, 2), (1, 3), (3, 2), (2, 0), (3, 3), (0, 2)]


@pytest.mark.parametrize(
    ("name", "precision"),
    [*product(("sign", "int8", "lowrank"), ("fp32", "fp16")), ("sign", "bf16")],
)
def test_residuals_survive_changes_of_stage_and_world_size(name: str, precision: str) -> None:
    blocks, step, gradient = None, 0, torch.zeros(200)
    for stage, world in STAGES_AND_WORLDS:
        config = compression_config(stage, name, **PRECISIONS[precision])
        config["rayzero"]["compression"]["error_feedback"] = True
        steps = range(step, step + 2)
        results = run_ranks(world, train_linear, config, steps, blocks)
        blocks, step = [result[0] for result in results], step + 2
        # Applied gradients are in the weights, the remainder in the residuals.
        gradient += sum(make_batch(number).sum(0) for number in steps) / max(world, 1)
        residuals = sums_by_param(blocks, "residual")
        weights = results[0][1] if precision == "fp32" else sums_by_param(blocks, "weights")
        assert results[0][2] > 0
        for number, block in enumerate(LinearLossModel().blocks):
            start = 0
            for attribute in ("weight", "bias"):
                key = f"blocks.{number}.{attribute}"
                numel = getattr(block, attribute).numel()
                actual = weights[key].reshape(-1) / -LR + residuals[key]
                expected = gradient[start : start + numel]
                torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)
                start += numel
        assert max(float(value.abs().max()) for value in residuals.values()) > 1e-3
    if precision == "fp16":
        assert json.loads(blocks[0].metadata)["loss_scale"]["value"] >= 2.0**2


def test_dropped_residuals_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    blocks = [run_ranks(0, train_linear, compression_config(0, "sign"), range(2), None)[0][0]]
    with caplog.at_level("WARNING", "rayzero.engine"):
        train_linear(0, 0, compression_config(0, "none"), range(2, 3), blocks)
    assert "which are dropped" in caplog.text


def train_with_overflow(rank: int, world: int, stage: int, name: str) -> None:
    engine, *_ = rayzero.initialize(model=LinearLossModel(), config=compression_config(stage, name))
    norms = []
    for step in range(4):
        data = make_batch(step).chunk(world)[rank].clone()
        if step == 2 and rank == 1:
            data[0, 3] = float("inf")
        engine.backward(engine(data))
        engine.step()
        residuals = engine._runtime.grad_reduction.residuals
        norms.append(float(sum(residual.local.abs().sum() for residual in residuals)))
    assert engine.metrics.skipped_steps == 1
    assert norms[1] > 0 == norms[2] < norms[3] < float("inf")


@pytest.mark.parametrize(("stage", "name"), [(0, "lowrank"), (1, "sign"), (3, "lowrank")])
def test_skipped_step_discards_residuals(stage: int, name: str) -> None:
    run_ranks(2, train_with_overflow, stage, name)


@pytest.mark.parametrize(
    ("overrides", "dtype", "message"),
    [
        ({"gradients": "int4"}, torch.float32, "rayzero.compression.gradients"),
        ({"block_size": 33}, torch.float32, "multiple of 32"),
        ({"gradients": "sign"}, torch.bfloat16, "main gradients in fp32"),
    ],
)
def test_unsupported_combinations(overrides: Any, dtype: torch.dtype, message: str) -> None:
    config = compression_config(0, "sign") | {"rayzero": {"compression": overrides}}
    with pytest.raises(ConfigError, match=message):
        rayzero.initialize(model=LinearLossModel().to(dtype), config=config)


def test_traffic_matches_payload_sizes() -> None:
    traffic = {
        name: run_ranks(2, train, 2, compression_config(2, name))[0][3]
        for name in ("none", *TOLERANCES)
    }
    full_bytes = traffic["none"]["reduce_scatter"]["bytes"]
    assert traffic["lowrank"]["all_reduce"]["bytes"] < 1.5 * full_bytes  # the model is tiny
    ratio = {
        name: traffic[name]["all_to_all"]["bytes"] / full_bytes
        for name in TOLERANCES
        if name != "lowrank"
    }
    assert ratio["bf16"] == ratio["fp16"] == 0.5
    assert 0.25 < ratio["int8"] < 0.3  # plus one scale per 32 values
    assert 1 / 32 < ratio["sign"] < 0.08


def test_deepspeed_keys_select_codecs() -> None:
    config = compression_config(2, "none")
    cast = run_ranks(2, train, 2, config | {"communication_data_type": "bf16"})
    assert cast[0][0] == run_ranks(2, train, 2, compression_config(2, "bf16"))[0][0]
    config["zero_optimization"]["zero_quantized_gradients"] = True
    assert run_ranks(2, train, 2, config)[0][3]["all_to_all"]["bytes"] > 0
