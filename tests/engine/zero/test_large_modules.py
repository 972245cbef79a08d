"""Stage 3 gathers an embedding and a head on their own, unless that could be wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import rayzero
from rayzero.engine.api.sharded_params import register_external_parameter
from rayzero.engine.config import parse_config
from rayzero.engine.errors import EngineError
from rayzero.engine.planning.persistent import persistent_bytes
from tests.engine.equal import (
    Model,
    accumulating,
    assert_equal,
    check_equal,
    evaluating,
    make,
    plain,
    start,
    train_reference,
)
from tests.engine.zoo import ResidualBlock
from tests.support.ranks import run_ranks

TOKENS, WIDTH, STEPS = 61, 12, 3


class Untied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(ResidualBlock(WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.logits(self.run(self.embed(ids[:, :-1])))
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Tied(Untied):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class FrozenEmbedding(Untied):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)


class EmbeddedTwice(Untied):
    def run(self, x: Tensor) -> Tensor:
        return super().run(x) + self.embed(torch.ones(x.shape[:2], dtype=torch.int64))


class Recomputed(Untied):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.norm(x)

    def logits(self, x: Tensor) -> Tensor:
        return checkpoint(self.head, x, use_reentrant=False)


class Listed(Untied):
    """Weights in a ParameterList, and a large module whose forward is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.full((WIDTH, TOKENS), 0.01)])
        self.never = nn.Linear(TOKENS, TOKENS)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x) + x @ self.weights[0]


class Attending(Untied):
    """Attention that reads its output layer's weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4 * WIDTH, 1, batch_first=True)

    def run(self, x: Tensor) -> Tensor:
        x = super().run(x)
        wide = x.repeat(1, 1, 4)
        return x + self.attention(wide, wide, wide, need_weights=False)[0][..., :WIDTH]


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(TOKENS, (4, 6), generator=generator) for _ in range(STEPS)]


def options(**section: Any) -> dict[str, Any]:
    return {"samples": 4, "rayzero": {"unshard_min_numel": 500, **section}}


def begin(model: nn.Module, **section: Any) -> Any:
    return start(model, **options(**section))


def planned_slots(cls: Model, **section: Any) -> int:
    """Bytes of gather buffers on two ranks, as planned."""
    document = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3},
        "rayzero": options(**section)["rayzero"],
    }
    return persistent_bytes(make(cls).to("meta"), parse_config(document), 2)["slots"]


def deferred() -> nn.Module:
    values = Untied().state_dict()
    with rayzero.zero_init():
        model = Untied()
    model.load_state_dict(values, assign=True)
    return model


MODELS: dict[Model, set[str]] = {  # and the blocks of their own that remain
    Untied: {"embed", "head"},
    Tied: set(),
    FrozenEmbedding: {"embed (frozen)", "head"},
    EmbeddedTwice: {"embed", "head"},
    Recomputed: {"embed", "head"},
    Listed: {"embed", "head", "never"},
    Attending: {"embed", "head", "attention"},
    deferred: {"embed", "head"},
}


def test_equals_pytorch() -> None:
    large = check_equal([(cls, evaluating, options()) for cls in MODELS], batches())
    assert large == [list(MODELS.values())] * 2


def penalty(model: Any) -> Tensor:
    return sum(it.square().mean() for it in model.embed.parameters())


READ = r"'(head|embed)' was read outside its forward"
READERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "functional": lambda model, x: functional.linear(x, model.head.weight),
    "kept": lambda model, x: functional.linear(x, model.kept[0]),
    "both": lambda model, x: model.head(x) * (1 + penalty(model)),
}


def reading(name: str, declares: bool) -> nn.Module:
    """A model that reads a large module's weight outside its forward."""
    model: Any = Untied()
    model.kept, model.logits = [model.head.weight], partial(READERS[name], model)
    for param in (model.head.weight, model.embed.weight) if declares else ():
        register_external_parameter(model, param)
    return model


def test_reads_elsewhere_that_are_declared() -> None:
    rows = [(partial(reading, name, True), plain, options()) for name in READERS]
    check_equal(rows, batches()[:1])


def refusals(rank: int, world: int) -> None:
    first, second, _ = (batch.chunk(world)[rank] for batch in batches())
    for name in READERS:
        engine = begin(make(partial(reading, name, False)))
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(EngineError, match=READ) as error:
                engine(first)
            assert "rayzero.unshard_min_numel: 0" in str(error.value)
        engine.close()
    model = make(Untied)
    head, engine = model.head.weight, begin(model)
    plain(engine, first)
    model.logits = lambda x: functional.linear(x, head)  # from outside of the model
    with pytest.raises(
        EngineError, match=r"(?s)'head\.weight' of.* gradient.*unshard_min_numel: 0"
    ):
        engine.backward(engine(second))


def test_reads_elsewhere_are_refused_by_name() -> None:
    run_ranks(2, refusals)


def gathered_bytes(rank: int, world: int) -> list[int]:
    """Bytes of gather buffers after each step, and without blocks of their own."""
    sizes = []
    for min_numel in (500, 0):
        engine = begin(make(Untied), unshard_min_numel=min_numel)
        for batch in batches():
            plain(engine, batch.chunk(world)[rank])
            engine(batch.chunk(world)[rank])
            sizes.append(engine._runtime.unshard_scheduler.buffers.total_bytes)
    return sizes


def _padded(numel: int) -> int:
    """A unit's elements on two ranks."""
    return -(-numel // 64) * 64


def test_an_embedding_and_a_head_share_one_buffer() -> None:
    sizes = run_ranks(2, gathered_bytes)[0]
    norm, block, large = (
        _padded(it) for it in (2 * WIDTH, 4 * WIDTH**2 + 3 * WIDTH, TOKENS * WIDTH)
    )
    assert sizes[2] == (norm + 2 * block + large) * 8
    assert sizes[5] == (_padded(2 * WIDTH + 2 * TOKENS * WIDTH) + 2 * block) * 8
    saved = planned_slots(Untied, unshard_min_numel=0) - planned_slots(Untied)
    assert saved >= sizes[5] - sizes[2]


def gathers(rank: int, world: int, reshard: bool) -> tuple[dict[str, Tensor], int, int, int]:
    """State, bytes gathered by all-gathers in the last step of two micro-steps, and of buffers."""
    engine = begin(make(Recomputed), reshard_after_forward=reshard)
    counters = engine._runtime.collectives.counters.by_name
    for batch in batches():
        before = counters["all_gather"].bytes if "all_gather" in counters else 0
        accumulating(engine, batch.chunk(world)[rank])
    moved = counters["all_gather"].bytes - before
    engine(batches()[0].chunk(world)[rank])
    numel = sum(unit.layout.numel for unit in engine._runtime.units) * 8
    return engine.state_dict(), moved, numel, engine._runtime.unshard_scheduler.buffers.total_bytes


def test_without_resharding_weights_are_gathered_once_a_step() -> None:
    expected = train_reference(make(Recomputed), batches())
    for reshard in (True, False):
        state, moved, model_bytes, buffers = run_ranks(2, gathers, reshard)[0]
        assert_equal(state, expected)
        if reshard:
            assert moved > 2 * model_bytes
            assert buffers < model_bytes
        else:
            assert moved == model_bytes
            assert buffers == model_bytes
    assert planned_slots(Recomputed, reshard_after_forward=False) >= model_bytes
