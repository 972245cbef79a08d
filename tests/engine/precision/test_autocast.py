"""`torch.autocast` around forward, by config or by the user."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero.engine.errors import ConfigError
from tests.engine import zoo
from tests.engine.matrix.cells import OPTIMIZERS, SAMPLES, STEPS, SmallModel, make_model
from tests.support.covering import covering
from tests.support.ranks import run_ranks

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
TrainResult = tuple[list[float], dict[str, Tensor], float, bool]


def train(
    rank: int, world: int, stage: int, dtype: str, micro_steps: int, user_autocast: bool
) -> TrainResult:
    """Returns losses, weights, the loss scale, and whether forward computed in 16 bits."""
    ranks = max(world, 1)
    model, low = make_model("fp32", seed=rank), []
    engine, *_ = rayzero.initialize(
        model=model,
        model_parameters=zoo.two_groups(model),
        optimizer=OPTIMIZERS["sgd"],
        config={
            "gradient_clipping": 0,
            "train_batch_size": SAMPLES,
            "gradient_accumulation_steps": micro_steps,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 150},
            "torch_autocast": {"enabled": not user_autocast, "dtype": dtype},
        },
    )
    context = torch.autocast("cpu", LOW[dtype]) if user_autocast else nullcontext()
    model.head.register_forward_hook(lambda *args: low.append(args[-1].dtype is LOW[dtype]))
    losses = []
    for batch in zoo.batches(STEPS, SAMPLES):
        for part in batch.chunk(ranks)[rank].chunk(micro_steps):
            with context:
                loss = engine(part[:, :-1], targets=part[:, 1:])["loss"]
            engine.backward(loss)
            engine.step()
        losses.append(engine.metrics.loss)
    assert {param.dtype for param in engine.module.parameters()} == {torch.float32}
    return losses, engine.state_dict(), engine.loss_scale, all(low)


def train_reference(dtype: str, parts: int) -> tuple[list[float], dict[str, Tensor]]:
    model: SmallModel = make_model("fp32")
    optimizer, losses = OPTIMIZERS["sgd"](zoo.two_groups(model)), []
    scale = 2.0**16 if dtype == "fp16" else 1.0
    for batch in zoo.batches(STEPS, SAMPLES):
        optimizer.zero_grad()
        mean = 0.0
        for part in batch.chunk(parts):
            with torch.autocast("cpu", LOW[dtype]):
                loss = model(part[:, :-1], targets=part[:, 1:])["loss"]
            (loss * scale).backward()
            mean += loss.item() / parts
        for param in model.parameters():
            param.grad.div_(scale * parts)
        optimizer.step()
        losses.append(mean)
    return losses, model.state_dict()


AXES = {
    "user_autocast": (False, True),
    "stage": (0, 1, 2, 3),
    "ranks": ((0, 1), (2, 4)),  # world size and micro-steps
}
ROWS = [("bf16", *row.values()) for row in covering(AXES, 2)]
ROWS += [("fp16", False, 0, (2, 2)), ("fp16", False, 3, (2, 2))]  # which scales its loss


@pytest.mark.parametrize(("dtype", "user_autocast", "stage", "ranks"), ROWS)
def test_equals_pytorch_autocast(dtype, user_autocast, stage, ranks):
    world, micro_steps = ranks
    expected_losses, expected = train_reference(dtype, max(world, 1) * micro_steps)
    limit, expected_scale = (1e-4, 2.0**16) if dtype == "fp16" else (1e-3, 1.0)
    for result in run_ranks(world, train, stage, dtype, micro_steps, user_autocast):
        losses, state, scale, low = result
        assert losses == pytest.approx(expected_losses, rel=limit)
        assert (scale, low) == (expected_scale, True)
        for name, value in expected.items() if state else ():
            assert zoo.relative_l2_error(state[name], value) < limit, name


def test_invalid_autocast_settings():
    config = {"torch_autocast": {"enabled": True, "dtype": "fp32"}}
    with pytest.raises(ConfigError, match=r"torch_autocast\.dtype"):
        rayzero.initialize(model=make_model("fp32"), optimizer=OPTIMIZERS["sgd"], config=config)


@pytest.mark.parametrize("stage", [0, 3])
def test_autocast_of_16_bit_weights_and_a_dtype_of_buffers(stage):
    """DeepSpeed takes both; it keeps buffers as they are unless the config says their dtype."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    engine, *_ = rayzero.initialize(
        model=model,
        config={
            "bf16": {"enabled": True},
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
            "data_types": {"buffer_dtype": "bf16"},
            "optimizer": {"type": "SGD"},
            "zero_optimization": {"stage": stage},
        },
    )
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert model[1].running_var.dtype is torch.bfloat16
    assert model[1].num_batches_tracked.dtype is torch.int64
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    engine(torch.ones(8, 4).bfloat16())
    assert seen == [True]
