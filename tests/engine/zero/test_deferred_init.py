"""A model built on the meta device has the same values as with ordinary construction."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import rayzero
from rayzero.engine.api.params import GatheredParameters
from rayzero.engine.errors import ConfigError
from rayzero.engine.zero import deferred_init
from rayzero.engine.zero.deferred_init import Materializer, is_recorded, zero_init
from tests.engine import zoo
from tests.engine.equal import assert_equal, make, plain, train_reference, train_rows
from tests.support.ranks import run_ranks


class Rotary(nn.Module):
    """Buffers computed from other buffers, a constant list, a value that is read back."""

    def __init__(self) -> None:
        super().__init__()
        base = 1.0 / 10 ** (torch.arange(0, 8, 2).float() / 8)
        self.register_buffer("angles", torch.outer(torch.arange(5).float(), base))
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)).bool())
        self.register_buffer("listed", torch.tensor([1.0, 2.0, 3.0]) * 2)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 4)]
        self.weight = nn.Parameter(torch.randn(3, 4) * self.rates[-1])


class ViewsAndCopies(nn.Module):
    """Initialisations that touch views, copies and other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6, padding_idx=2)
        self.square = nn.Linear(6, 6)
        nn.init.orthogonal_(self.square.weight)
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(5, 5), 0.4))
        nn.init.trunc_normal_(self.square.bias, std=0.2)
        self.copied = nn.Parameter(self.square.weight.detach().clone() + 1)
        self.rnn = nn.GRU(6, 4)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        with torch.no_grad():
            self.embed.weight[3].fill_(0.25)
            self.encoder.layers[1].linear1.weight[:, ::2].uniform_(-1, 1)
        self.apply(self._rescale)

    def _rescale(self, module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.1)


class OwnGenerator(nn.Module):
    """Its own generator."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = nn.Parameter(torch.empty(4, 4))
        nn.init.normal_(self.first, generator=generator)
        self.second = nn.Parameter(torch.rand(4, generator=generator))


class Converted(nn.Module):
    """Views of other dtypes, lazy conjugates and negatives, data that is exchanged."""

    def __init__(self) -> None:
        super().__init__()
        turned = torch.polar(torch.ones(4), torch.randn(4))
        self.register_buffer("pairs", torch.view_as_real(turned).clone())
        self.register_buffer("conjugate", turned.conj().clone())
        self.register_buffer("negative", turned.conj().imag.clone())
        self.register_buffer("bits", torch.randn(3).view(torch.int32) + 1)
        torch.view_as_real(turned)[:, 0].fill_(2)
        self.register_buffer("turned", turned)
        self.half = nn.Linear(3, 2).half().bfloat16()
        self.exchanged = nn.Parameter(torch.randn(3))
        self.exchanged.data = torch.randn(2)
        self.exchanged.data.mul_(3)
        known = torch.from_numpy(np.array([1, 2], dtype=np.float32))  # has memory
        self.picked = nn.Parameter(torch.randn(6)[torch.tensor([0, 2, 4])])
        known.copy_(self.exchanged.data)
        self.through = nn.Parameter(torch.zeros(2) + known)


@pytest.mark.parametrize(
    "make", [zoo.IrregularModel, Rotary, ViewsAndCopies, OwnGenerator, Converted]
)
def test_values_equal_ordinary_construction(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(11)
    ordinary = make()
    after = torch.rand(1)
    torch.manual_seed(11)
    with zero_init(), zero_init():  # nested ones record once
        model = make()
    assert torch.equal(torch.rand(1), after)  # the generator is in the same state
    values = Materializer(model, torch.device("cpu"))
    tensors = dict(model.state_dict(keep_vars=True))
    # In any order: each is replayed on its own.
    for name, expected in reversed(ordinary.state_dict().items()):
        if isinstance(tensors[name], nn.Parameter):
            assert tensors[name].is_meta
        assert torch.equal(values.initial_value(tensors[name]), expected), name
    values.clear()
    assert not any(map(is_recorded, model.state_dict(keep_vars=True).values()))


def deferred(cls: Callable[[], nn.Module]) -> nn.Module:
    """In nested contexts, of a class that is declared there."""
    with zero_init(), zero_init():

        class Declared(cls):  # type: ignore[misc, valid-type]
            is_meta = Tensor.is_meta

        return Declared().double()


class SlicesItsParameters(nn.Module):
    """Writes to parts of its parameters, some of which have weak references (`nn.LSTM`)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4, padding_idx=0)
        self.rnn = nn.LSTM(4, 4)
        self.rnn.bias_hh_l0.data[4:8].fill_(1)
        with torch.no_grad():
            self.rnn.bias_ih_l0[4:8].fill_(1)
        self.head = nn.Linear(4, 1)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embed(tokens).transpose(0, 1))
        return self.head(hidden).mean() * self.scale.sum()


def test_trains_like_the_ordinary_model() -> None:
    model = partial(deferred, SlicesItsParameters)
    rows = [(model, plain, {"stage": stage}) for stage in range(4)]
    results = run_ranks(2, train_rows, rows, TOKENS)
    expected = train_reference(make(SlicesItsParameters), TOKENS)
    for state, _ in results[0]:
        assert_equal(state, expected)


TOKENS = [torch.arange(8).reshape(8, 1) + step for step in range(2)]


def build_by_factory(rank: int, world: int) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    config = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 100}}
    engine = rayzero.initialize(model=zoo.IrregularModel, optimizer=zoo.sgd, config=config)[0]
    return engine.state_dict()


@pytest.mark.parametrize("world", [0, 2])
def test_a_factory_gives_the_ordinary_model(world: int) -> None:
    torch.testing.assert_close(
        run_ranks(world, build_by_factory)[0], dict(zoo.make_model().state_dict()), rtol=0, atol=0
    )


def meta_with_reset(rank: int, world: int) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    engine, *_ = rayzero.initialize(
        model=model, optimizer=zoo.sgd, config={"zero_optimization": {"stage": 3}}
    )
    engine.backward(engine(torch.randn(3, 4)).sum())
    engine.step()
    return engine.state_dict()


def test_meta_model_is_initialized_by_reset_parameters() -> None:
    state = run_ranks(2, meta_with_reset)[0]
    assert state["0.weight"].abs().max() > 0
    assert all(value.isfinite().all() for value in state.values())
    assert state["1.num_batches_tracked"] == 1
    with torch.device("meta"):
        model = zoo.PairBlock()
    with pytest.raises(ConfigError, match=r"PairBlock has no reset_parameters.*\n.*zero_init"):
        rayzero.initialize(model=model, optimizer=zoo.sgd, config={})


BLOCKS, WIDTH = 60, 256
BLOCK_BYTES = WIDTH * WIDTH * 4


def make_deep() -> nn.Module:
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
    return nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))


def peak_allocated(rank: int, world: int) -> int:
    """Peak bytes of torch's allocator, from construction to two steps.

    Without shared memory, which does not come from that allocator.
    """
    with (
        mock.patch.dict(os.environ, RAYZERO_SHARED_MEMORY="0"),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        engine, *_ = rayzero.initialize(
            model=make_deep,
            optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
            config={"zero_optimization": {"stage": 3}},
        )
        for _ in range(2):
            engine.backward(engine(torch.randn(2, WIDTH)).square().mean())
            engine.step()
    out = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            out += event.nbytes()
            peak = max(peak, out)
    return peak


def test_full_model_is_never_allocated() -> None:
    full_bytes = BLOCKS * BLOCK_BYTES
    shards = full_bytes // 3  # weights, on three ranks; gradients are mapped, not allocated
    # Five buffers, two gradients of autograd, activations, and received parts: the more of them,
    # the later the slowest rank is.
    live = 14 * BLOCK_BYTES
    assert shards + live < full_bytes
    for peak in run_ranks(3, peak_allocated):
        assert shards < peak <= shards + live


def test_recordings_are_dropped_with_the_last_model_that_needs_them() -> None:
    torch.manual_seed(2)
    shared, ordinary = torch.randn(3), [nn.Linear(4, 3), nn.Linear(4, 3)]
    torch.manual_seed(2)
    with zero_init():
        shared_later = torch.randn(3)
        models = [nn.Linear(4, 3), nn.Linear(4, 3)]
    with zero_init():  # of values that were recorded in the context before
        for model in models:
            model.bias.data.copy_(shared_later)
    operations = deferred_init._recorder._operations
    for number, (model, expected) in enumerate(zip(models, ordinary, strict=True)):
        values = Materializer(model, torch.device("cpu"))
        assert torch.equal(values.initial_value(model.weight), expected.weight)
        assert torch.equal(values.initial_value(model.bias), shared)
        kept = len(operations)
        values.clear()
        operations = deferred_init._recorder._operations
        assert len(operations) < kept
        assert [is_recorded(it.weight) for it in models] == [False, not number]
    assert not is_recorded(shared_later)


def test_model_that_was_thrown_away_waits_for_no_engine() -> None:
    before = len(deferred_init._recorder.modules)
    with zero_init():
        model = nn.Linear(4, 3)
    assert len(deferred_init._recorder.modules) == before + 1
    del model
    gc.collect()
    assert len(deferred_init._recorder.modules) == before
    with pytest.raises(ZeroDivisionError), zero_init():
        raise ZeroDivisionError
    assert torch.empty(1, device="meta").is_meta


def test_values_lost_to_the_meta_device_are_an_error() -> None:
    """An adapter that is made after the model and moved to its device, whose weights were not 0."""
    with zero_init():
        model = nn.Linear(4, 3, bias=False)
    model.adapter = nn.Linear(4, 3, bias=False)
    nn.init.zeros_(model.adapter.weight)
    model.adapter.weight = nn.Parameter(model.adapter.weight.data.to(model.weight.device))
    with pytest.raises(ConfigError, match=r"moving Linear.weight there lost its values"):
        rayzero.initialize(model=model, optimizer=zoo.sgd, config={})


def resize(model: nn.Module, device: str, rows: int) -> None:
    """As transformers resizes embeddings under stage 3: the new ones are made where the old ones
    are, outside of zero.Init, and written inside GatheredParameters."""
    old, new = model[0], nn.Embedding(6, 3, device=device)
    with GatheredParameters([old.weight]):
        new.weight.data[-rows:, :] = old.weight.data.mean(0)[None, :].repeat(rows, 1)
    with GatheredParameters([old.weight, new.weight], modifier_rank=0):
        new.weight.data[:4, :] = old.weight.data[:4, :]
    with GatheredParameters([old.weight, new.weight], modifier_rank=0):
        old.weight, old.num_embeddings = new.weight, 6


def test_embeddings_resized_before_initialize() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(4, 3))
    resize(plain, "cpu", 2)
    config = {"optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 3}}
    for rows in (2, 1):  # of the two new ones
        torch.manual_seed(0)
        with zero_init():
            model = nn.Sequential(nn.Embedding(4, 3))
        resize(model, "meta", rows)
        if rows == 1:
            with pytest.raises(ConfigError, match=r"\(6, 3\) on the meta .* not in all of"):
                rayzero.initialize(model=model, config=config)
            break
        engine, *_ = rayzero.initialize(model=model, config=config)
        assert torch.equal(engine.state_dict()["0.weight"], plain[0].weight)
