"""Activation checkpointing by DeepSpeed's names, against plain torch's, and against none at all."""

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
Way = Callable[..., Any]


@pytest.fixture(autouse=True)
def _unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `configure` sets is the process's."""
    monkeypatch.setattr(activation_checkpointing._Options, "configured", False)
    monkeypatch.setattr(activation_checkpointing._Options, "in_cpu", False)


class Block(nn.Module):
    """Saves more than its input, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.drop(torch.tanh(self.up(x)))
        return x + scale * self.down(hidden)


class Stack(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.way(block, x)
        return x.square().mean()


def none(function: Way, *args: Any) -> Any:
    return function(*args)


def torchs(function: Way, *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False)


def gradients(way: Way) -> tuple[list[Tensor], Tensor, int]:
    """Gradients, the next random number, and the bytes that forward keeps, as autograd tells."""
    model, kept = Stack(way), set[int]()
    nbytes = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal nbytes
        if not isinstance(tensor, nn.Parameter) and tensor.data_ptr() not in kept:
            kept.add(tensor.data_ptr())
            nbytes += tensor.nbytes
        return tensor

    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(2)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        loss = model(x)
    loss.backward()
    found = [x.grad, *(one.grad for one in model.parameters())]
    assert all(one is not None for one in found)
    return [one for one in found if one is not None], torch.rand(3), nbytes


def same(seen: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(seen, right, strict=True))


@pytest.mark.parametrize("way", [checkpoint, non_reentrant_checkpoint])
def test_gradients_and_random_numbers_are_plain_torchs_and_less_is_kept(way: Way) -> None:
    right, drawn, everything = gradients(none)
    torch_right, torch_drawn, torch_kept = gradients(torchs)
    seen, here, kept = gradients(way)
    assert same(seen, right)
    assert same(seen, torch_right)
    assert torch.equal(here, drawn)
    assert torch.equal(here, torch_drawn)
    assert kept == torch_kept < 0.3 * everything


NO_OPS = {
    "partition_activations": True,
    "contiguous_memory_optimization": True,
    "number_checkpoints": 2,
    "synchronize_checkpoint_boundary": True,
    "profile": True,
}


@pytest.mark.parametrize("section", [{}, *({key: one} for key, one in NO_OPS.items()), NO_OPS])
def test_what_asks_for_nothing_changes_nothing(section: dict[str, Any]) -> None:
    right, _, kept = gradients(checkpoint)
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
    seen, _, now = gradients(checkpoint)
    assert same(seen, right)
    assert now == kept


def test_model_parallelism_is_refused() -> None:
    with pytest.raises(ConfigError, match="no model parallelism"):
        configure(mpu_=object())
    assert not activation_checkpointing.is_configured()


def in_cpu(how: str) -> None:
    section = {"activation_checkpointing": {"cpu_checkpointing": how != "argument over config"}}
    if how == "argument":
        configure(checkpoint_in_cpu=True)
    elif how == "config":
        configure(deepspeed_config={"train_batch_size": 8} | section)
    else:
        configure(deepspeed_config={"train_batch_size": 8} | section, checkpoint_in_cpu=True)


@pytest.mark.parametrize("how", ["argument", "config", "argument over config"])
def test_what_is_kept_goes_through_host_memory(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's `save_on_cpu` gets every block's input, and nothing else."""
    right, _, kept = gradients(checkpoint)
    real, moved = torch.autograd.graph.save_on_cpu, []

    class Counted(real):  # type: ignore[misc, valid-type]
        def __init__(self, pin_memory: bool = False) -> None:
            super().__init__(pin_memory)
            inner = self.pack_hook

            def pack(tensor: Tensor) -> Any:
                moved.append(tensor.nbytes)
                return inner(tensor)

            self.pack_hook = pack

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Counted)
    in_cpu(how)
    seen, _, left = gradients(checkpoint)
    assert same(seen, right)
    inputs = DEPTH * SAMPLES * WIDTH * 4
    assert sum(moved) == inputs
    assert left == kept - inputs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="host memory is apart on a GPU only")
def test_it_leaves_a_gpu() -> None:
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
        held = torch.cuda.memory_allocated() - before
        out.square().mean().backward()
        return held, [one.grad for one in blocks.parameters() if one.grad is not None]

    torch.manual_seed(0)
    state = nn.Sequential(*(Block() for _ in range(4))).state_dict()
    data = torch.randn(4096, WIDTH)
    on_gpu, right = forward_bytes()
    configure(checkpoint_in_cpu=True)
    in_host, seen = forward_bytes()
    assert in_host < 0.5 * on_gpu
    assert same(seen, right)


def trained_each(rank: int, world: int, stage: int) -> list[dict[str, Tensor]]:
    found = [trained(rank, world, stage, way) for way in (none, torchs, checkpoint)]
    configure(checkpoint_in_cpu=True)
    found.append(trained(rank, world, stage, checkpoint))
    configure()
    return found


def trained(rank: int, world: int, stage: int, way: Way) -> dict[str, Tensor]:
    engine, *_ = rayzero.initialize(
        model=Stack(way),
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
def test_an_engine_trains_the_same_with_it(stage: int) -> None:
    right, *others = run_ranks(2, trained_each, stage, timeout_s=300)[0]
    for seen in others:
        assert all(torch.equal(seen[key], value) for key, value in right.items())
