"""The course of a parity test: an engine and plain torch train models on the same batches, in
float64, and must end with the same weights.

    check_equal([(Model, script, {"stage": 2})], batches)

A script is what one micro-step of the training loop does with a rank's part of the batch; plain
torch runs it too, over all ranks' parts, called as an engine (`Plain`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import rayzero
from tests.support.ranks import run_ranks

Model = Callable[[], nn.Module]
Script = Callable[[Any, Tensor], None]
Row = tuple[Model, Script, dict[str, Any]]
"""A model, a script, and arguments of `start`."""


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.3, momentum=0.9)


def make(cls: Model, seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return cls().double()


def normal_batches(steps: int, width: int) -> list[Tensor]:
    """Of 8 samples."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, width, generator=generator, dtype=torch.float64) for _ in range(steps)]


def start(
    model: nn.Module,
    stage: int = 3,
    *,
    samples: int = 8,
    optimizer: Any = sgd,
    zero: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """An engine; `zero`: further keys of that section, `more`: of the config."""
    config = {
        "gradient_clipping": 0,
        "train_batch_size": samples,
        "zero_optimization": {"stage": stage, **(zero or {})},
        **more,
    }
    return rayzero.initialize(model=model, optimizer=optimizer, config=config)[0]


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


class Plain:
    """A model in plain torch, called as an engine. Its steps are those of `train_reference`."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model

    def __call__(self, part: Tensor) -> Tensor:
        out: Tensor = self.module(part)
        return out

    def train(self, mode: bool = True) -> Plain:
        self.module.train(mode)
        return self

    def eval(self) -> Plain:
        return self.train(False)

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        return

    def step(self) -> None:
        return


def train_rows(
    rank: int, world: int, rows: Sequence[Row], batches: Sequence[Tensor]
) -> list[tuple[dict[str, Tensor], set[str]]]:
    """Of each row the state, and the names of the large modules that are blocks. The ranks' initial
    weights differ: rank 0's are used."""
    results = []
    for cls, script, options in rows:
        engine = start(make(cls, 3 + rank), **options)
        for batch in batches:
            for part in batch.chunk(world)[rank].chunk(micro_steps_of(options)):
                script(engine, part)
        state = {name: value.clone() for name, value in engine.state_dict().items()}
        large = {it.name for it in engine._runtime.unshard_scheduler.blocks if it.large}
        results.append((state, large))
        engine.close()
    return results


def micro_steps_of(options: dict[str, Any]) -> int:
    return int(options.get("gradient_accumulation_steps", 1))


def train_reference(
    model: nn.Module,
    batches: Sequence[Tensor],
    script: Script = plain,
    parts: int = 1,
    options: Mapping[str, Any] = {},
) -> dict[str, Tensor]:
    """Plain torch's weights, where each batch is accumulated over `parts`."""
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = options.get("optimizer", sgd)([{"params": trained}])
    keeps_unused = options.get("rayzero", {}).get("unused_gradients") == "none"
    for batch in batches:
        optimizer.zero_grad()
        for part in batch.chunk(parts):
            script(Plain(model), part)
        for param in trained:
            if param.grad is not None:
                param.grad /= parts
            elif not keeps_unused:
                param.grad = torch.zeros_like(param)
        if clip := options.get("gradient_clipping"):
            nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
    return model.state_dict()


def assert_equal(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: object = ""
) -> None:
    """In float64, to rounding; and of the same dtypes."""
    for name, value in expected.items():
        text = partial("{} {}: {}".format, what, name)
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11, msg=text)


def check_equal(
    rows: Sequence[Row], batches: Sequence[Tensor], world: int = 2
) -> list[list[set[str]]]:
    """Returns the large blocks of each rank, by row."""
    results = run_ranks(world, train_rows, rows, batches)
    for (cls, script, options), (state, _) in zip(rows, results[0], strict=True):
        parts = world * micro_steps_of(options)
        expected = train_reference(make(cls), batches, script, parts, options)
        assert_equal(state, expected, (cls, script, options))
    return [[large for _, large in result] for result in results]
