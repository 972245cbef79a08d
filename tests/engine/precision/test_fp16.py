"""fp16 training: overflows, the loss scale over steps and checkpoints, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero.engine.config.schedules import LR_CURVES
from rayzero.engine.config.sections import Fp16Config
from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.precision.loss_scale import DynamicScaler
from rayzero.engine.session import use_session
from tests.engine import zoo
from tests.engine.state.blocks import Block, StateSession
from tests.support.ranks import run_ranks

FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2}
RULES = Fp16Config(**FP16)
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 50}}


def make_engine(stage: int, blocks: list[Block] | None = None, **more: Any) -> rayzero.Engine:
    with use_session(StateSession(blocks)):
        return rayzero.initialize(
            model=zoo.make_model(),
            config={
                "gradient_clipping": 0,
                "train_batch_size": 12,
                "gradient_accumulation_steps": 2,
                "optimizer": {
                    "type": "AdamW",
                    "params": {"lr": 0.1, "eps": 1e-4, "weight_decay": 0.01},
                },
                "scheduler": WARMUP,
                "fp16": FP16,
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 150},
                **more,
            },
        )[0]


def train_step(engine: rayzero.Engine, batch: Tensor, overflow: bool = False) -> None:
    part = batch.chunk(engine.world_size)[engine.rank]
    for micro in part.chunk(engine.settings.batches.micro_steps):
        loss = engine(micro[:, :-1], targets=micro[:, 1:])["loss"]
        engine.backward(loss * float("inf") if overflow else loss)
        engine.step()


def train_with_overflows(
    rank: int, world: int, stage: int, first: int, overflows: str, blocks: list[Block] | None
) -> tuple[list[tuple[Any, ...]], dict[str, Tensor], Block]:
    """Train; steps marked `x` overflow on the last rank."""
    engine, results_by_step = make_engine(stage, blocks), []
    batches = list(zoo.batches(first + len(overflows), 12))[first:]
    for batch, mark in zip(batches, overflows, strict=True):
        train_step(engine, batch, mark == "x" and rank == max(world, 1) - 1)
        results_by_step.append((engine.loss_scale, engine.skipped_steps, engine.metrics.lr))
    return results_by_step, engine.state_dict(), Block.of(engine)


STEPS = "..x.xx....x."


@pytest.mark.parametrize(("world", "stage"), [(0, 0), (2, 1), (3, 2), (2, 3), (0, 3), (3, 0)])
def test_overflow_skips_the_step_and_lowers_the_scale(world, stage):
    results = run_ranks(world, train_with_overflows, stage, 0, STEPS, None)
    assert all(results_by_step == results[0][0] for results_by_step, _, _ in results)
    scaler, curve = DynamicScaler(RULES), LR_CURVES[WARMUP["type"]](**WARMUP["params"])
    clean = [curve.lr(number - 1, 0, 0.1) for number in range(STEPS.count("."))]
    for number, (scale, skipped, lr) in enumerate(results[0][0]):
        scaler.update(overflow=STEPS[number] == "x")
        assert scale == scaler.value
        assert skipped == STEPS[: number + 1].count("x")
        # The schedule does not advance.
        assert lr == pytest.approx(clean[number - STEPS[:number].count("x")])
    # Skipped steps have no effect: equal to training without them.
    data = [
        batch for batch, step in zip(zoo.batches(len(STEPS), 12), STEPS, strict=True) if step == "."
    ]

    def make_optimizer(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        adamw = torch.optim.AdamW(groups, lr=0.1, eps=1e-4, weight_decay=0.01)
        lrs = iter(clean)
        adamw.register_step_pre_hook(lambda *_: adamw.param_groups[0].update(lr=next(lrs)))
        return adamw

    def one_group(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": [param for param in model.parameters() if param.requires_grad]}]

    _, expected = zoo.train_mixed_reference(
        zoo.make_model(),
        make_optimizer,
        data,
        0.0,
        max(world, 1) * 2,
        torch.float16,
        2.0**8,
        one_group,
    )
    state = results[0][1]
    errors = {name: zoo.relative_l2_error(state[name], expected[name]) for name in expected}
    assert max(errors.values()) < 5e-3, errors


def test_scale_is_resumed_at_other_stages_and_world_sizes():
    blocks, scaler, step_count = None, DynamicScaler(RULES), 0
    for stage, world in ((2, 2), (3, 3), (0, 0), (1, 2)):
        results = run_ranks(world, train_with_overflows, stage, step_count, "x..", blocks)
        for step, (scale, skipped, _) in zip("x..", results[0][0], strict=True):
            scaler.update(overflow=step == "x")
            step_count += 1
            assert (scale, skipped) == (scaler.value, -(-step_count // 3))
        blocks = [block for _, _, block in results]
        assert all(
            json.loads(block.metadata)["loss_scale"] == scaler.state_dict() for block in blocks
        )


def test_state_of_another_precision_loads():
    engine = make_engine(0, fp16={"enabled": False}, bf16={"enabled": True})
    train_step(engine, next(zoo.batches(1, 12)))
    resumed = make_engine(0, [Block.of(engine)])
    assert (resumed.loss_scale, resumed.global_steps) == (2.0**8, 1)
    train_step(resumed, next(zoo.batches(1, 12)))
    fp32 = make_engine(0, [Block.of(resumed)], fp16={"enabled": False})
    assert fp32.loss_scale == 1.0


def overflow_at_minimum(rank: int, world: int, stage: int) -> str:
    engine = make_engine(stage, fp16=FP16 | {"initial_scale_power": 1, "hysteresis": 1})
    before = engine.state_dict()

    def set_nan(grad: Tensor) -> Tensor:
        return torch.full_like(grad, float("nan")) if rank == 0 else grad

    batch = next(zoo.batches(1, 12))
    train_step(engine, batch, overflow=rank == world - 1)  # 2 -> 1, the lowest
    assert engine.loss_scale == 1.0
    if stage < 3:
        engine.module.blocks[1].down.weight.register_hook(set_nan)
    with pytest.raises(EngineError) as caught:
        train_step(engine, batch, overflow=stage == 3 and rank == 0)
    assert engine.global_steps == 1
    after = engine.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    return str(caught.value)


@pytest.mark.parametrize("stage", [2, 3])
def test_overflow_at_minimum_scale_is_an_error(stage):
    first, *others = run_ranks(2, overflow_at_minimum, stage)
    assert all(message == first for message in others)
    assert "an overflow at the lowest loss scale, 1" in first
    assert "bf16" in first
    assert "fp16.min_loss_scale" in first
    assert "blocks.1.down.weight" in first if stage < 3 else "in the unit" in first


def test_overflow_of_the_norm_is_reported():
    engine = make_engine(0, fp16=FP16 | {"initial_scale_power": 0, "hysteresis": 1})
    engine._runtime.units[0].grads.owned().fill_(1e38)
    engine.backward(engine(torch.zeros(3, 5).long(), targets=torch.zeros(3, 5).long())["loss"])
    for unit in engine._runtime.units:
        if unit.grads is not None:
            unit.grads.owned().fill_(3e38)
    engine.progress.micro_step = 1
    with pytest.raises(EngineError, match="every element is"):
        engine.step()


def make_fixed_scale_engine(scale: float, **more: Any) -> rayzero.Engine:
    return rayzero.initialize(
        model=nn.Linear(4, 1, bias=False),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=1e6),
        config={
            "gradient_clipping": 0,
            "fp16": {"enabled": True, "loss_scale": scale, "auto_cast": True},
            **more,
        },
    )[0]


def test_fixed_scale_preserves_small_gradients():
    """Gradients of 1e-8 underflow in fp16 unless the loss is scaled."""
    moved = {}
    for scale in (1.0, 1024.0):
        engine = make_fixed_scale_engine(scale)
        (weight,) = engine.optimizer.param_groups[0]["params"]
        before = weight.detach().clone()
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 4)).float().sum() * 1e-8)
            engine.step()
        engine.backward(engine(torch.ones(1, 4)).sum() * float("inf"))
        engine.step()
        assert (engine.loss_scale, engine.skipped_steps) == (scale, 1)
        moved[scale] = (before - weight.detach())[:4]
    assert not moved[1.0].any()
    assert torch.allclose(moved[1024.0], torch.full((4,), 0.02), rtol=0.05)


def test_inputs_are_cast_only_with_auto_cast():
    engine = make_fixed_scale_engine(8.0)
    assert engine(torch.ones(1, 4)).dtype is torch.float16
    other = make_fixed_scale_engine(8.0, fp16={"enabled": True, "loss_scale": 8})
    with pytest.raises(RuntimeError, match="dtype"):
        other(torch.ones(1, 4))
    assert other(torch.ones(1, 4).half()).dtype is torch.float16


@pytest.mark.parametrize(
    ("fp16", "match"),
    [
        ({"initial_scale_power": 2000}, "initial_scale_power: from -64 to 64"),
        ({"min_loss_scale": 0}, "min_loss_scale"),
        ({"hysteresis": 0}, "hysteresis"),
        ({"loss_scale": -1}, "loss_scale"),
        ({"fp16_master_weights_and_grads": True}, "fp16_master_weights_and_grads: refused"),
    ],
)
def test_unsupported_settings(fp16, match):
    with pytest.raises(ConfigError, match=match):
        make_engine(0, fp16={"enabled": True} | fp16)


def test_fp16_with_bf16_is_rejected():
    with pytest.raises(ConfigError, match="fp16 and bf16"):
        make_engine(0, bf16={"enabled": True})
