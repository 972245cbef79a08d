"""Parameters and buffers in unusual memory, and modules that are registered several times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from tests.engine import zoo
from tests.support.ranks import run_ranks


class Strided(nn.Module):
    """Tensors in memory that is expanded, transposed, empty, or of unusual types."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("turned", torch.randn(3, 4).t())
        self.register_buffer("expanded", torch.randn(3).expand(4, 3))
        self.register_buffer("complex", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("mask", torch.rand(3) > 0.5)
        self.register_buffer("hidden", torch.randn(2), persistent=False)
        self.frozen = nn.Parameter(torch.randn(5, 3).t(), requires_grad=False)
        self.trained = nn.Parameter(torch.randn(5, 3).t())
        self.empty = nn.Parameter(torch.randn(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.mask + self.expanded[0] + self.complex.real + self.empty.sum()
        return (self.turned @ y.t()).square().mean() + (y @ self.frozen @ self.trained.t()).mean()


def train_strided(rank: int, world: int, stage: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(rank)  # other values on every rank: rank 0's are used
    model = Strided()
    torch.manual_seed(5)
    engine, *_ = rayzero.initialize(
        model=model,
        optimizer=zoo.sgd,
        config={"gradient_clipping": 0, "zero_optimization": {"stage": stage}},
    )
    for _ in range(3):
        engine.backward(engine(torch.randn(2, 3)))
        engine.step()
    return [*model.buffers()], engine.state_dict()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_tensors_in_any_memory(stage: int) -> None:
    results = run_ranks(2, train_strided, stage)
    torch.manual_seed(0)
    model = Strided()
    torch.manual_seed(5)
    optimizer = zoo.sgd([{"params": [p for p in model.parameters() if p.requires_grad]}])
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 3)).backward()
        optimizer.step()
    for buffers, _ in results:
        assert all(torch.equal(*pair) for pair in zip(buffers, model.buffers(), strict=True))
    state, expected = results[0][1], model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(state[name], value, rtol=1e-5), name
        assert state[name].dtype is value.dtype


class Wrapper(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shared(torch.tanh(self.own(x)))


class SharedInside(nn.Module):
    """A module inside every block, gathered with what holds them all."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Wrapper(shared) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class RepeatedBlock(nn.Module):
    """One block in the list several times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Wrapper(nn.Linear(4, 4))] * 3 + [Wrapper(nn.Linear(4, 4))])

    forward = SharedInside.forward


def train_shared(rank: int, world: int, make: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    engine, *_ = rayzero.initialize(
        model=make().double(),
        optimizer=zoo.sgd,
        config={"gradient_clipping": 0, "zero_optimization": {"stage": 3}},
    )
    for _ in range(4):
        engine.backward(engine(torch.ones(2, 4, dtype=torch.float64)))
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("make", [SharedInside, RepeatedBlock])
def test_modules_registered_in_several_places(make: type[nn.Module]) -> None:
    state = run_ranks(2, train_shared, make)[0]
    torch.manual_seed(0)
    model = make().double()
    optimizer = zoo.sgd([{"params": model.parameters()}])
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 4, dtype=torch.float64)).backward()
        optimizer.step()
    expected = model.state_dict()
    assert max(zoo.relative_error(state[name], expected[name]) for name in expected) < 1e-9
