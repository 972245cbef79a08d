"""The course of a parity test: an engine and plain torch train one model on the same batches, in
float64, and must end with the same weights.

    state = check_equal(Model, batches, script)

A script is what one step of the training loop does with a rank's part of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import rayzero
from tests.engine import zoo
from tests.support.ranks import run_ranks

Model = Callable[[], nn.Module]
Script = Callable[[Any, Tensor], None]


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.3, momentum=0.9)


def make(cls: Model) -> Any:
    torch.manual_seed(3)
    return cls().double()


def normal_batches(steps: int, width: int) -> list[Tensor]:
    """Of 8 samples."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, width, generator=generator, dtype=torch.float64) for _ in range(steps)]


def start(model: nn.Module, stage: int = 3, *, samples: int = 8, **more: Any) -> Any:
    """An engine that trains by `sgd`; `more`: further keys of the config."""
    config = {
        "gradient_clipping": 0,
        "train_batch_size": samples,
        "zero_optimization": {"stage": stage},
        **more,
    }
    return rayzero.initialize(model=model, optimizer=sgd, config=config)[0]


def plain(engine: Any, part: Tensor) -> None:
    engine.backward(engine(part))
    engine.step()


def evaluating(engine: Any, part: Tensor) -> None:
    """Evaluations between steps, and between forward and backward, have no effect."""
    with torch.no_grad():
        assert engine.eval()(part).isfinite()
    loss = engine.train()(part)
    with torch.inference_mode():
        engine(part)
    engine.backward(loss)
    engine.step()


def accumulating(engine: Any, part: Tensor) -> None:
    """Two micro-steps, and an evaluation between them."""
    first, last = part.chunk(2)
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(first) / 2)
    with torch.no_grad():
        engine(last)
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(last) / 2)
    engine.step()


def train(
    rank: int, world: int, cls: Model, batches: Sequence[Tensor], script: Script, config: Any
) -> tuple[dict[str, Tensor], Any]:
    """The state, and the names of the large modules that are blocks."""
    engine = start(make(cls), **config)
    for batch in batches:
        script(engine, batch.chunk(world)[rank])
    return engine.state_dict(), large_blocks(engine)


def large_blocks(engine: Any) -> set[str]:
    scheduler = engine._runtime.unshard_scheduler
    return {it.name for it in scheduler.blocks if it.large} if scheduler is not None else set()


def train_reference(model: nn.Module, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = sgd([{"params": trained}])
    for batch in batches:
        optimizer.zero_grad()
        model(batch).backward()
        for param in trained:  # unused ones have a zero gradient in the engine
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        optimizer.step()
    return model.state_dict()


def assert_equal(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert max(zoo.relative_error(state[name], expected[name]) for name in expected) < 1e-9


def check_equal(
    cls: Model, batches: Sequence[Tensor], script: Script = plain, world: int = 2, **config: Any
) -> list[set[str]]:
    """Returns the large blocks of each rank."""
    results = run_ranks(world, train, cls, batches, script, config)
    assert_equal(results[0][0], train_reference(make(cls), batches))
    return [large for _, large in results]
