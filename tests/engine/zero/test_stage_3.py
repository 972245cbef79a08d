"""Stage 3 equals plain PyTorch for models with irregular control flow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rayzero.engine.comm.shared_memory import MAX_UNREAD
from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.zero.gather_buffers import BlockState
from tests.engine.equal import (
    assert_equal,
    check_equal,
    evaluating,
    make,
    normal_batches,
    plain,
    start,
    train_reference,
)
from tests.support.ranks import run_ranks

WIDTH = 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


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
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

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


class Tree(nn.Module):
    """Blocks in blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Base(2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage.run(stage.first(x))
        return x.square().mean()


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


MODELS: list[Callable[[], nn.Module]] = [
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
]


def batches(steps: int) -> list[Tensor]:
    return normal_batches(steps, WIDTH)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("cls", MODELS, ids=lambda cls: cls.__name__)
def test_equals_pytorch(cls: type[nn.Module], count: int) -> None:
    check_equal(cls, batches(4), evaluating, rayzero={"gather_buffers": count})


def check_addresses(rank: int, world: int) -> None:
    engine = start(make(Base))
    model = engine.module
    names = dict(model.named_parameters())
    assert all(param.isnan().all() for param in names.values())
    assert names["blocks.0.up.weight"].shape == (3 * WIDTH, WIDTH)
    addresses: dict[str, set[int]] = {name: set() for name in names}
    for name, param in names.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        owner.register_forward_hook(
            lambda *_, name=name, param=param: addresses[name].add(param.data_ptr())
        )
    for batch in batches(4):
        engine.backward(engine(batch.chunk(world)[rank]))
        engine.step()
        assert all(param.isnan().all() for param in names.values())
    # An address in the first step, and an address after the new assignment that follows it.
    assert all(len(values) <= 2 for values in addresses.values())
    latest = {sorted(addresses[f"blocks.{index}.up.weight"])[-1] for index in range(5)}
    assert len(latest) <= 3  # two buffers, and possibly one of the first assignment


def test_sharded_weights_read_as_nan_and_are_gathered_at_one_address() -> None:
    run_ranks(2, check_addresses)


class LeakingModel(Base):
    """The loss uses a tensor stored by a block, so no hook runs when backward enters the block."""

    def forward(self, x: Tensor) -> Tensor:
        self.run(self.first(x))
        return self.blocks[0].stored.square().mean()


class StoringBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.stored = self.up(x)
        return x


def train_leaking(rank: int, world: int) -> None:
    model = make(LeakingModel)
    model.blocks[0] = StoringBlock().double()
    engine = start(model)
    with pytest.raises(EngineError, match=r"'blocks\.0' got a gradient while it was not gathered"):
        engine.backward(engine(batches(1)[0].chunk(world)[rank]))


def test_gradient_that_bypasses_its_block_is_an_error() -> None:
    run_ranks(2, train_leaking)


def take_second_derivative(rank: int, world: int) -> None:
    engine = start(make(Base))
    x = batches(1)[0].chunk(world)[rank].requires_grad_()
    loss = engine(x)
    with pytest.raises(EngineError, match=r"create_graph"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_second_derivatives_are_rejected() -> None:
    run_ranks(2, take_second_derivative)


class FailingModel(Base):
    fail = True

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if self.fail:
            raise ValueError("user error")
        return super().run(x)


def train_after_error(rank: int, world: int) -> dict[str, Tensor]:
    model = make(FailingModel)
    engine = start(model)
    with pytest.raises(ValueError, match="user error"):
        engine(batches(1)[0].chunk(world)[rank])
    model.fail = False
    for batch in batches(4):
        plain(engine, batch.chunk(world)[rank])
    return engine.state_dict()


def test_engine_is_usable_after_an_error_in_forward() -> None:
    state = run_ranks(2, train_after_error)[0]
    FailingModel.fail = False
    assert_equal(state, train_reference(make(FailingModel), batches(4)))
    FailingModel.fail = True


def unit_names(rank: int, world: int) -> list[str]:
    engine = start(make(Base), rayzero={"unshard_modules": ["Linear"]})
    for batch in batches(2):
        engine.backward(engine(batch.chunk(world)[rank]))
        engine.step()
    with pytest.raises(ConfigError, match=r"no module of class 'Blok' \(did you mean 'Block'"):
        start(make(Base), rayzero={"unshard_modules": ["Blok"]})
    return [unit.name for unit in engine._runtime.units]


def test_unshard_modules_select_blocks() -> None:
    names = run_ranks(2, unit_names)[0]
    assert len(names) == 11
    assert "blocks.0.up" in names


def next_block_states(rank: int, world: int) -> list[str]:
    """State of each block while its predecessor computes, in the third forward."""
    model = make(Base)
    engine = start(model)
    states: list[str] = []
    gatherer = engine._runtime.unshard_scheduler
    blocks = {block.name: block for block in gatherer.blocks}
    data = batches(3)
    for batch in data[:2]:
        engine.backward(engine(batch.chunk(world)[rank]))
        engine.step()
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
    engine.backward(engine(batches(1)[0].chunk(world)[rank]))
    engine.step()
    return [*unread, len(exchange._not_yet_read)]


def test_long_evaluation_has_bounded_exchanges() -> None:
    for unread in run_ranks(2, unread_exchanges):
        *during, after = unread
        assert during[-1] >= MAX_UNREAD  # gathered repeatedly
        assert max(during) <= MAX_UNREAD + 2
        assert after == 0
