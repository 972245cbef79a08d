"""Stage 3 equals plain PyTorch for models with irregular control flow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rayzero.engine.comm.shared_memory import MAX_UNREAD
from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.zero.gather_buffers import BlockState
from tests.engine.equal import (
    Model,
    check_equal,
    evaluating,
    make,
    normal_batches,
    plain,
    start,
)
from tests.engine.zoo import ResidualBlock
from tests.support.ranks import run_ranks

WIDTH = 12


class Caller(nn.Module):
    """A block that calls a block registered elsewhere in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: nn.Module) -> Tensor:
        return other(torch.tanh(self.own(x))) + torch.sin(self.own(x))


class Base(nn.Module):
    def __init__(self, blocks: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(ResidualBlock(WIDTH) for _ in range(blocks))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.first(x)).square().mean()


class Checkpointed(Base):
    reentrant = False

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class ReentrantCheckpointed(Checkpointed):
    reentrant = True


class CheckpointedTogether(Base):
    def run(self, x: Tensor) -> Tensor:
        return checkpoint(super().run, x, use_reentrant=False)


class Nested(Base):
    def __init__(self) -> None:
        super().__init__(4)
        self.callers = nn.ModuleList(Caller() for _ in range(3))

    def run(self, x: Tensor) -> Tensor:
        for caller, block in zip(self.callers, self.blocks, strict=False):
            x = caller(x, block)
        return self.blocks[3](x)


class Shared(Base):
    """One block used by every caller, as in models that share weights across depth."""

    def __init__(self) -> None:
        super().__init__(2)
        self.callers = nn.ModuleList(Caller() for _ in range(3))

    def run(self, x: Tensor) -> Tensor:
        for caller in self.callers:
            x = caller(x, self.blocks[0])
        return self.blocks[1](x)


class OutOfOrder(Base):
    """Runs its blocks in another order than it registers them, some twice, with branches."""

    def run(self, x: Tensor) -> Tensor:
        a, b, c, d, e = self.blocks
        return e(d(x) + b(x)) + a(c(a(x)))


class PartlyUnused(Base):
    def run(self, x: Tensor) -> Tensor:
        return self.blocks[4](self.blocks[0](x)) + 0 * self.blocks[2](x).detach().sum()


class Lora(nn.Module):
    """Frozen and trained weights in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 3, bias=False)
        self.up = nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.frozen(x)) + self.up(self.down(x))


class LoraModel(Base):
    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(Lora() for _ in range(4))


class CheckpointedWhole(nn.Module):
    """The root is recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Base()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Wrapper(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shared(torch.tanh(self.own(x)))


class SharedInside(Base):
    """A module inside every block, gathered with what holds them all."""

    def __init__(self) -> None:
        super().__init__(0)
        shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Wrapper(shared) for _ in range(4))


class RepeatedBlock(Base):
    """One block in the list several times."""

    def __init__(self) -> None:
        super().__init__(0)
        once, repeated = (Wrapper(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.blocks = nn.ModuleList([repeated] * 3 + [once])


class Strided(nn.Module):
    """Tensors in memory that is expanded, transposed, empty, or of unusual types."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)
        self.register_buffer("turned", torch.randn(3, 4).t())
        self.register_buffer("expanded", torch.randn(3).double().expand(4, 3))
        self.register_buffer("complex", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("mask", torch.rand(3) > 0.5)
        self.register_buffer("hidden", torch.randn(2), persistent=False)
        self.frozen = nn.Parameter(torch.randn(5, 3).t(), requires_grad=False)
        self.trained = nn.Parameter(torch.randn(5, 3).t())
        self.empty = nn.Parameter(torch.randn(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.mask + self.expanded[0] + self.complex.real + self.empty.sum()
        y = y + self.hidden.sum()
        return (self.turned @ y.t()).square().mean() + (y @ self.frozen @ self.trained.t()).mean()


def batches(steps: int) -> list[Tensor]:
    return normal_batches(steps, WIDTH)


def after_an_error(engine: Any, part: Tensor) -> None:
    """In the midst of forward."""

    def fail(*_: Any) -> None:
        raise ValueError("user error")

    hook = engine.module.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="user error"):
        engine(part)
    hook.remove()
    plain(engine, part)


MODELS: list[Model] = [
    Base,
    Checkpointed,
    ReentrantCheckpointed,
    CheckpointedTogether,
    Nested,
    Shared,
    OutOfOrder,
    PartlyUnused,
    LoraModel,
    CheckpointedWhole,
    SharedInside,
    RepeatedBlock,
]


@pytest.mark.parametrize("buffers", [2, 3])
def test_equals_pytorch(buffers: int) -> None:
    options = {"rayzero": {"gather_buffers": buffers}}
    check_equal([(cls, evaluating, options) for cls in MODELS], batches(4))


def test_equals_pytorch_after_errors_and_at_other_stages() -> None:
    strided = [(Strided, evaluating, {"stage": stage}) for stage in (0, 2, 3)]
    check_equal([(Base, after_an_error, {}), *strided], batches(3))


def check_addresses(rank: int, world: int) -> None:
    engine = start(make(Base))
    model = engine.module
    names = dict(model.named_parameters())
    assert all(param.isnan().all() for param in names.values())
    assert names["blocks.0.up.weight"].shape == (2 * WIDTH, WIDTH)
    addresses: dict[str, set[int]] = {name: set() for name in names}
    for name, param in names.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        owner.register_forward_hook(
            lambda *_, name=name, param=param: addresses[name].add(param.data_ptr())
        )
    for batch in batches(4):
        plain(engine, batch.chunk(world)[rank])
        assert all(param.isnan().all() for param in names.values())
    # An address in the first step, and an address after the new assignment that follows it.
    assert all(len(values) <= 2 for values in addresses.values())
    latest = {sorted(addresses[f"blocks.{index}.up.weight"])[-1] for index in range(5)}
    assert len(latest) <= 3  # two buffers, and possibly one of the first assignment


def test_sharded_weights_read_as_nan_and_are_gathered_at_one_address() -> None:
    run_ranks(2, check_addresses)


def refusals(rank: int, world: int) -> None:
    x = batches(1)[0].chunk(world)[rank]
    selected = start(make(Base), rayzero={"unshard_modules": ["Linear"]})
    plain(selected, x)
    names = [unit.name for unit in selected._runtime.units]
    assert len(names) == 11
    assert "blocks.0.up" in names
    x.requires_grad_()
    loss = start(make(Base))(x)
    with pytest.raises(EngineError, match=r"create_graph"):
        torch.autograd.grad(loss, x, create_graph=True)
    # The loss uses a tensor stored by a block, so no hook runs when backward enters the block.
    engine, stored = start(make(Base)), []
    block = engine.module.blocks[0].up
    block.register_forward_hook(lambda _, args, output: stored.append(output))
    engine(x)
    with pytest.raises(EngineError, match=r"'blocks\.0' got a gradient while it was not gathered"):
        engine.backward(stored[0].square().mean())
    with pytest.raises(ConfigError, match=r"no module of class 'Blok'"):
        start(make(Base), rayzero={"unshard_modules": ["Blok"]})


def test_what_would_be_wrong_is_refused_and_modules_are_selected() -> None:
    run_ranks(2, refusals)


def next_block_states(rank: int, world: int) -> list[str]:
    """State of each block while its predecessor computes, in the third forward."""
    model = make(Base)
    engine = start(model)
    states: list[str] = []
    blocks = {block.name: block for block in engine._runtime.unshard_scheduler.blocks}
    data = batches(3)
    for batch in data[:2]:
        plain(engine, batch.chunk(world)[rank])
    for index in range(4):
        following = blocks[f"blocks.{index + 1}"]
        model.blocks[index].up.register_forward_hook(
            lambda *_, following=following: states.append(following.state.value)
        )
    engine(data[2].chunk(world)[rank])
    return states


def test_next_block_is_prefetched() -> None:
    assert run_ranks(2, next_block_states)[0] == [BlockState.GATHERING.value] * 4


def unread_exchanges(rank: int, world: int) -> list[int]:
    """Number of unconfirmed exchanges after each of many forwards, and after a step."""
    engine = start(make(Base))
    exchange = engine._runtime.collectives._backend
    unread = []
    with torch.no_grad():
        for batch in batches(60):
            engine(batch.chunk(world)[rank])
            unread.append(len(exchange._not_yet_read))
    plain(engine, batches(1)[0].chunk(world)[rank])
    return [*unread, len(exchange._not_yet_read)]


def test_long_evaluation_has_bounded_exchanges() -> None:
    for unread in run_ranks(2, unread_exchanges):
        *during, after = unread
        assert during[-1] >= MAX_UNREAD  # gathered repeatedly
        assert max(during) <= MAX_UNREAD + 2
        assert after == 0
