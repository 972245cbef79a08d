"""torch.compile beside the engine: equal to plain torch without it, with bounded graphs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import rayzero
from rayzero.engine.compiling import keep_batch_size_dynamic
from rayzero.engine.errors import ConfigError
from tests.engine import zoo
from tests.engine.equal import (
    accumulating,
    assert_equal,
    make,
    normal_batches,
    start,
    train_reference,
)
from tests.support.ranks import run_ranks

WIDTH, BLOCKS, STEPS = 12, 6, 3


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(zoo.ResidualBlock(WIDTH) for _ in range(BLOCKS))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x.square().mean()


class Graphs:
    """A backend that counts the graphs that it is given, and runs them by another backend."""

    def __init__(self, name: str = "eager") -> None:
        self.name = name
        torch.compiler.reset()
        logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
        torch._dynamo.utils.counters.clear()
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.count += 1
        return torch._dynamo.lookup_backend(self.name)(graph, inputs)

    @property
    def breaks(self) -> int:
        return sum(torch._dynamo.utils.counters["graph_break"].values())


def batches() -> list[Tensor]:
    return normal_batches(STEPS, WIDTH)


def train(engine: rayzero.Engine, rank: int, world: int) -> None:
    for batch in batches():
        accumulating(engine, batch.chunk(world)[rank])


def compile_whole(engine: rayzero.Engine, backend: Graphs) -> None:
    engine.module.compile(backend=backend, fullgraph=True)


def compile_blocks(engine: rayzero.Engine, backend: Graphs) -> None:
    for block in engine.module.blocks:
        block.compile(backend=backend, fullgraph=True)


def wrap_blocks(engine: rayzero.Engine, backend: Graphs) -> None:
    engine.module.blocks = nn.ModuleList(
        torch.compile(block, backend=backend) for block in engine.module.blocks
    )


def compile_engine(engine: rayzero.Engine, backend: Graphs) -> None:
    engine.compile(backend, {"fullgraph": True})
    assert engine.is_compiled


def compile_pair(engine: rayzero.Engine, backend: Graphs) -> None:
    """A function around blocks, which the engine cannot see."""
    model = engine.module
    first, second, *others = model.blocks
    two = torch.compile(lambda x: second(first(x)), backend=backend)
    rest = nn.Sequential(*others)
    model.__dict__["forward"] = lambda x: rest(two(model.first(x))).square().mean()


def train_compiled(
    rank: int,
    world: int,
    stage: int,
    how: Callable[..., None],
    before: bool,
    recompute: bool,
) -> tuple[dict[str, Tensor], int, int, int]:
    backend, model = (
        Graphs("aot_eager" if stage == 3 and before else "eager"),
        make(partial(Model, recompute)),
    )
    if before:
        how(type("Holder", (), {"module": model}), backend)
    engine = start(model, stage)
    if not before:
        how(engine, backend)
    train(engine, rank, world)
    first = backend.count
    train(engine, rank, world)
    state = {name.replace("_orig_mod.", ""): it for name, it in engine.state_dict().items()}
    engine.close()
    return state, first, backend.count, backend.breaks


def twice_reference() -> dict[str, Tensor]:
    return train_reference(make(Model), batches() * 2)


# Evaluation and training, each with an input that requires gradients and one that does not; not
# one a block, nor one for each buffer that weights are gathered into.
FEW = range(2, 5)


@pytest.mark.parametrize(
    ("stage", "how", "before", "recompute", "graphs"),
    [
        (0, compile_whole, True, False, FEW),
        (2, compile_whole, False, False, FEW),
        (3, compile_blocks, True, False, FEW),
        (3, compile_blocks, False, True, FEW),
        (3, compile_engine, False, False, FEW),
        (3, wrap_blocks, True, False, FEW),
        # A graph is cut at each block, where the engine waits.
        (3, compile_pair, False, False, [2]),
    ],
)
def test_equals_pytorch(
    stage: int,
    how: Callable[..., None],
    before: bool,
    recompute: bool,
    graphs: Sequence[int],
) -> None:
    results = run_ranks(2, train_compiled, stage, how, before, recompute)
    state, first, total, breaks = results[0]
    assert_equal(state, twice_reference())
    assert bool(breaks) is (graphs is not FEW)
    assert total == first
    assert total in graphs


class TokenModel(Model):
    """The same over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(self.embedding(tokens))


def compile_function(engine: rayzero.Engine, backend: Graphs, fullgraph: bool = False) -> None:
    """Between eager modules, as flex attention often is."""
    activation = torch.compile(lambda x: torch.tanh(x) + x, backend=backend, fullgraph=fullgraph)
    engine.module.first.register_forward_hook(lambda module, args, output: activation(output))


def count_graphs(
    rank: int, world: int, stage: int, how: Callable[..., None], peak: float | None
) -> tuple[int, int, float | None]:
    """Graphs after the first step and at the end; the flops of a token."""
    backend = Graphs("aot_eager")
    torch.manual_seed(3)
    engine = start(TokenModel().double(), stage, rayzero={"peak_flops": peak})
    how(engine, backend)
    counts = []
    for _ in range(STEPS):
        engine.backward(engine(torch.arange(8).reshape(4, 2)))
        engine.step()
        counts.append(backend.count)
    assert not backend.breaks
    metrics = engine.metrics
    engine.close()
    if metrics.mfu is None:
        return counts[0], counts[-1], None
    return counts[0], counts[-1], metrics.flops_per_s * metrics.step_s / 8


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        (2, compile_whole),
        (3, compile_engine),
        (3, compile_blocks),
        (0, compile_function),
        (3, partial(compile_function, fullgraph=True)),
    ],
)
def test_a_known_peak_leaves_nothing_eager(stage: int, how: Callable[..., None]) -> None:
    first, last, flops = run_ranks(2, count_graphs, stage, how, 1e12)[0]
    assert first == last > 0
    assert (first, last, None) == run_ranks(2, count_graphs, stage, how, None)[0]
    parameters = sum(param.numel() for param in TokenModel().parameters())
    assert flops == pytest.approx(6 * parameters)


def compile_too_much(rank: int, world: int) -> None:
    backend, config = Graphs(), {"stage": 3}
    compiled = make(Model)
    compiled.compile(backend=backend)
    for model in (compiled, torch.compile(make(Model))):
        with pytest.raises(
            ConfigError, match=r"the model is compiled as a whole at stage 3"
        ) as seen:
            start(model, **config)
        assert "for block in model.layers: block.compile()" in str(seen.value)
    model = make(Model)
    engine = start(model, **config)
    whole = torch.compile(model, backend=backend)
    with pytest.raises(ConfigError, match="the model is compiled as a whole"):
        whole(batches()[0])
    model.compile(backend=backend)
    with pytest.raises(ConfigError, match="the model is compiled as a whole"):
        engine(batches()[0])
    model._compiled_call_impl = None
    blocks, model.blocks = model.blocks, torch.compile(model.blocks, backend=backend)
    with pytest.raises(ConfigError, match="the module 'blocks' is compiled as a whole"):
        engine(batches()[0])
    model.blocks = blocks
    train(engine, rank, world)  # the engine is usable after the refusal


def test_a_model_compiled_as_a_whole_is_refused_at_stage_3() -> None:
    run_ranks(2, compile_too_much)


def configured(rank: int, world: int, stage: int) -> dict[str, Tensor]:
    torch.compiler.reset()
    section = {"enabled": True, "backend": "eager", "kwargs": {"dynamic": False}}
    engine = start(make(Model), stage, compile=section)
    assert engine.is_compiled
    compiled = [name for name, it in engine.module.named_modules() if it._compiled_call_impl]
    assert compiled == ([""] if stage < 3 else [f"blocks.{index}" for index in range(BLOCKS)])
    with pytest.raises(ConfigError, match="a schedule, or compiled_autograd_enabled"):
        engine.compile(compiled_autograd_enabled=True)
    model = engine.module
    engine.close()
    model.load_state_dict(
        make(Model).state_dict(), assign=True
    )  # as a repair: another engine over it
    engine = start(model, stage, compile=section)
    train(engine, rank, world)
    train(engine, rank, world)
    return engine.state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_the_config_compiles_and_a_second_engine_over_the_model_does_too(stage: int) -> None:
    assert_equal(run_ranks(2, configured, stage)[0], twice_reference())


def test_batches_of_other_sizes_share_a_graph_and_a_copy_of_the_model_adds_no_hook() -> None:
    graphs = Graphs()
    model = nn.Linear(WIDTH, WIDTH)
    model.compile(backend=graphs)
    hooks: list[RemovableHandle] = []
    keep_batch_size_dynamic(model, hooks)
    twin = copy.deepcopy(model)  # as an average of the weights has it
    for _ in range(2):
        twin(torch.ones(4, WIDTH))
    assert len(hooks) == 1
    for samples in (4, 6, 3):
        model(torch.ones(samples, WIDTH))
    assert (graphs.count, graphs.breaks) == (1, 0)
    for hook in hooks:
        hook.remove()
    assert not model._forward_pre_hooks
