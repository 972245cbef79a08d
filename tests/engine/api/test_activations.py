"""DeepSpeed's activation checkpointing API equals PyTorch's, and training without checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import rayzero
from rayzero.engine.api import activation_checkpointing
from rayzero.engine.api.activation_checkpointing import (
    checkpoint,
    configure,
    non_reentrant_checkpoint,
)
from rayzero.engine.errors import ConfigError
from tests.support.ranks import run_ranks

WIDTH, DEPTH, SAMPLES, STEPS = 16, 3, 8, 2
Checkpoint = Callable[..., Any]


@pytest.fixture(autouse=True)
def _reset_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """`configure` sets options of the process."""
    monkeypatch.setattr(activation_checkpointing._Options, "configured", False)
    monkeypatch.setattr(activation_checkpointing._Options, "in_cpu", False)


class Block(nn.Module):
    """Saves more than its input, and uses random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.drop(torch.tanh(self.up(x)))
        return x + scale * self.down(hidden)


class Stack(nn.Module):
    def __init__(self, checkpoint_fn: Checkpoint) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.checkpoint_fn = checkpoint_fn

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.checkpoint_fn(block, x)
        return x.square().mean()


def no_checkpoint(function: Checkpoint, *args: Any) -> Any:
    return function(*args)


def pytorch_checkpoint(function: Checkpoint, *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False)


def gradients(checkpoint_fn: Checkpoint) -> tuple[list[Tensor], Tensor, int]:
    """Returns the gradients, the next random numbers, and the bytes saved for backward."""
    model, saved = Stack(checkpoint_fn), set[int]()
    nbytes = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal nbytes
        if not isinstance(tensor, nn.Parameter) and tensor.data_ptr() not in saved:
            saved.add(tensor.data_ptr())
            nbytes += tensor.nbytes
        return tensor

    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(2)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x)
    loss.backward()
    grads = [tensor.grad for tensor in (x, *model.parameters())]
    assert all(grad is not None for grad in grads)
    return [grad for grad in grads if grad is not None], torch.rand(3), nbytes


def equal(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("checkpoint_fn", [checkpoint, non_reentrant_checkpoint])
def test_checkpoint_equals_pytorch(checkpoint_fn: Checkpoint) -> None:
    expected, expected_random, full_bytes = gradients(no_checkpoint)
    torch_grads, torch_random, torch_bytes = gradients(pytorch_checkpoint)
    actual, actual_random, nbytes = gradients(checkpoint_fn)
    assert equal(actual, expected)
    assert equal(actual, torch_grads)
    assert torch.equal(actual_random, expected_random)
    assert torch.equal(actual_random, torch_random)
    assert nbytes == torch_bytes < 0.3 * full_bytes


NO_OPS = {
    "partition_activations": True,
    "contiguous_memory_optimization": True,
    "number_checkpoints": 2,
    "synchronize_checkpoint_boundary": True,
    "profile": True,
}


@pytest.mark.parametrize("section", [{}, *({key: value} for key, value in NO_OPS.items()), NO_OPS])
def test_no_op_options_have_no_effect(section: dict[str, Any]) -> None:
    expected, _, expected_bytes = gradients(checkpoint)
    assert not activation_checkpointing.is_configured()
    configure(deepspeed_config={"train_batch_size": 8, "activation_checkpointing": section})
    configure(
        None,
        partition_activations=True,
        contiguous_checkpointing=True,
        num_checkpoints=2,
        synchronize=True,
        profile=True,
    )
    activation_checkpointing.reset()
    assert activation_checkpointing.is_configured()
    actual, _, nbytes = gradients(checkpoint)
    assert equal(actual, expected)
    assert nbytes == expected_bytes


def test_model_parallelism_is_rejected() -> None:
    with pytest.raises(ConfigError, match="no model parallelism"):
        configure(mpu_=object())
    assert not activation_checkpointing.is_configured()


def configure_cpu_checkpointing(source: str) -> None:
    section = {"activation_checkpointing": {"cpu_checkpointing": source != "argument over config"}}
    if source == "argument":
        configure(checkpoint_in_cpu=True)
    elif source == "config":
        configure(deepspeed_config={"train_batch_size": 8} | section)
    else:
        configure(deepspeed_config={"train_batch_size": 8} | section, checkpoint_in_cpu=True)


@pytest.mark.parametrize("source", ["argument", "config", "argument over config"])
def test_cpu_checkpointing_offloads_inputs(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`save_on_cpu` of PyTorch receives every block's input, and nothing else."""
    expected, _, expected_bytes = gradients(checkpoint)
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
    configure_cpu_checkpointing(source)
    actual, _, nbytes = gradients(checkpoint)
    assert equal(actual, expected)
    inputs = DEPTH * SAMPLES * WIDTH * 4
    assert sum(sizes) == inputs
    assert nbytes == expected_bytes - inputs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a GPU")
def test_cpu_checkpointing_reduces_gpu_memory() -> None:
    def forward_bytes() -> tuple[int, list[Tensor]]:
        blocks = nn.Sequential(*(Block() for _ in range(4))).cuda()
        blocks.load_state_dict(state)
        x = torch.randn(4096, WIDTH, device="cuda", requires_grad=True)
        x.data.copy_(data)
        torch.manual_seed(3)
        before = torch.cuda.memory_allocated()
        out = x
        for block in blocks:
            out = checkpoint(block, out)
        nbytes = torch.cuda.memory_allocated() - before
        out.square().mean().backward()
        return nbytes, [param.grad for param in blocks.parameters() if param.grad is not None]

    torch.manual_seed(0)
    state = nn.Sequential(*(Block() for _ in range(4))).state_dict()
    data = torch.randn(4096, WIDTH)
    gpu_bytes, expected = forward_bytes()
    configure(checkpoint_in_cpu=True)
    remaining_bytes, actual = forward_bytes()
    assert remaining_bytes < 0.5 * gpu_bytes
    assert equal(actual, expected)


def train_all(rank: int, world: int, stage: int) -> list[dict[str, Tensor]]:
    states = [
        train(rank, world, stage, checkpoint_fn)
        for checkpoint_fn in (no_checkpoint, pytorch_checkpoint, checkpoint)
    ]
    configure(checkpoint_in_cpu=True)
    states.append(train(rank, world, stage, checkpoint))
    configure()
    return states


def train(rank: int, world: int, stage: int, checkpoint_fn: Checkpoint) -> dict[str, Tensor]:
    engine, *_ = rayzero.initialize(
        model=Stack(checkpoint_fn),
        config={
            "train_batch_size": SAMPLES * max(world, 1),
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage},
        },
    )
    torch.manual_seed(4 + rank)
    for step in range(STEPS):
        x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step * 9 + rank))
        engine.backward(engine(x.requires_grad_()))
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpointing_does_not_change_training(stage: int) -> None:
    expected, *others = run_ranks(2, train_all, stage, timeout_s=300)[0]
    for actual in others:
        assert all(torch.equal(actual[key], value) for key, value in expected.items())
