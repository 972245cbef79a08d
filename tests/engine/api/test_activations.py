"""DeepSpeed's activation checkpointing API equals PyTorch's, and training without checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from rayzero.engine.api import activation_checkpointing
from rayzero.engine.api.activation_checkpointing import (
    checkpoint,
    configure,
    non_reentrant_checkpoint,
)
from rayzero.engine.errors import ConfigError
from tests.engine import equal
from tests.support.ranks import run_ranks

WIDTH, DEPTH, SAMPLES = 16, 3, 8
Checkpoint = Callable[..., Any]


@pytest.fixture(autouse=True)
def _reset_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """`configure` sets options of the process."""
    monkeypatch.setattr(activation_checkpointing._Options, "configured", False)
    monkeypatch.setattr(activation_checkpointing._Options, "in_cpu", False)


def no_checkpoint(function: Checkpoint, *args: Any) -> Any:
    return function(*args)


def pytorch_checkpoint(function: Checkpoint, *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False)


class Stack(nn.Module):
    """Blocks that save more than their inputs, and use random numbers."""

    def __init__(self, checkpoint_fn: Checkpoint) -> None:
        super().__init__()
        torch.manual_seed(0)
        wide = 4 * WIDTH
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, wide), nn.Tanh(), nn.Dropout(0.4), nn.Linear(wide, WIDTH)
            )
            for _ in range(DEPTH)
        )
        self.checkpoint_fn = checkpoint_fn

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.checkpoint_fn(block, x)
        return x.square().mean()


def gradients(checkpoint_fn: Checkpoint) -> tuple[list[Tensor], int]:
    """Returns the gradients and the next random numbers, and the bytes saved for backward."""
    model, saved = Stack(checkpoint_fn), dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(2)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x)
    loss.backward()
    grads = [tensor.grad for tensor in (x, *model.parameters()) if tensor.grad is not None]
    return [*grads, torch.rand(3)], sum(saved.values())


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("checkpoint_fn", [checkpoint, non_reentrant_checkpoint])
def test_checkpoint_equals_pytorch(checkpoint_fn: Checkpoint) -> None:
    expected, full_bytes = gradients(no_checkpoint)
    actual, nbytes = gradients(checkpoint_fn)
    assert_equal(actual, expected)
    assert nbytes == gradients(pytorch_checkpoint)[1] < 0.3 * full_bytes


def test_model_parallelism_is_rejected() -> None:
    with pytest.raises(ConfigError, match="no model parallelism"):
        configure(mpu_=object())
    assert not activation_checkpointing.is_configured()


IN_CPU, NOT_IN_CPU = (
    {"train_batch_size": 8, "activation_checkpointing": {"cpu_checkpointing": value}}
    for value in (True, False)
)
NO_OPS = ("partition_activations", "contiguous_checkpointing", "num_checkpoints", "synchronize")


@pytest.mark.parametrize(
    ("options", "in_cpu"),
    [
        ({"profile": True} | dict.fromkeys(NO_OPS, True), False),
        ({"checkpoint_in_cpu": True}, True),
        ({"deepspeed_config": IN_CPU}, True),
        ({"deepspeed_config": NOT_IN_CPU, "checkpoint_in_cpu": True}, True),
    ],
)
def test_only_cpu_checkpointing_has_an_effect(
    options: dict[str, Any], in_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`save_on_cpu` of PyTorch receives every block's input, and nothing else."""
    expected, expected_bytes = gradients(checkpoint)
    real, sizes = torch.autograd.graph.save_on_cpu, []

    class CountingSaveOnCpu(real):  # type: ignore[misc, valid-type]
        def __init__(self, pin_memory: bool = False) -> None:
            super().__init__(pin_memory)
            pack_hook = self.pack_hook

            def pack(tensor: Tensor) -> Any:
                sizes.append(tensor.nbytes)
                return pack_hook(tensor)

            self.pack_hook = pack

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", CountingSaveOnCpu)
    assert not activation_checkpointing.is_configured()
    configure(**options)
    activation_checkpointing.reset()
    assert activation_checkpointing.is_configured()
    actual, nbytes = gradients(checkpoint)
    assert_equal(actual, expected)
    inputs = DEPTH * SAMPLES * WIDTH * 4 if in_cpu else 0
    assert sum(sizes) == inputs
    assert nbytes == expected_bytes - inputs


def train_all(rank: int, world: int, stage: int) -> list[dict[str, Tensor]]:
    """With each function, at last in CPU memory."""
    states = []
    for checkpoint_fn in (no_checkpoint, pytorch_checkpoint, checkpoint, checkpoint):
        configure(checkpoint_in_cpu=len(states) == 3)
        engine = equal.start(Stack(checkpoint_fn), stage)
        torch.manual_seed(4 + rank)
        for batch in equal.normal_batches(2, WIDTH):
            equal.plain(engine, batch.float().chunk(world)[rank].requires_grad_())
        states.append(engine.state_dict())
    return states


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpointing_does_not_change_training(stage: int) -> None:
    expected, *others = run_ranks(2, train_all, stage)[0]
    for actual in others:
        assert all(torch.equal(actual[key], value) for key, value in expected.items())
