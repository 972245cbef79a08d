"""Updated weights that are gathered while forward runs: `rayzero.overlap_weight_gather`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rayzero
from rayzero.engine.comm.backend import Work
from rayzero.engine.errors import ConfigError
from rayzero.engine.zero.lazy_weights import LazyWeights
from rayzero.engine.zero.unit import Unit
from tests.engine import zoo
from tests.support.ranks import run_ranks


class OddUses(nn.Module):
    """Weights that another module reads, and modules that are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)  # reads out_proj's weight
        self.scales = nn.ParameterList(torch.rand(8) for _ in range(3))
        self.sometimes = nn.Linear(8, 8, bias=False)  # in a bucket of its own
        self.last = nn.Linear(8, 8)

    def forward(self, tokens: Tensor, extra: bool = False) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for scale in self.scales:
            x = x * scale
        if extra:
            x = x + self.sometimes(x)
        return F.cross_entropy(
            (self.last(x) @ self.embed.weight.t()).flatten(0, 1), tokens.flatten()
        )


def train(engine_or_none: Any, model: nn.Module, steps: int = 4) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        tokens, extra = torch.randint(0, 8, (2, 5)), step % 2 == 1
        if engine_or_none is not None:
            engine_or_none.backward(engine_or_none(tokens, extra))
            engine_or_none.step()


@contextmanager
def messages_not_shared_memory() -> Iterator[None]:
    """Gathers proceed in gloo's threads, as on a GPU; through shared memory a rank does its share
    before it returns to the script."""
    os.environ["RAYZERO_SHARED_MEMORY"] = "0"
    try:
        yield
    finally:
        del os.environ["RAYZERO_SHARED_MEMORY"]


def build(stage: int, bf16: bool, lazy: bool, model: nn.Module, **zero: Any) -> rayzero.Engine:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100, **zero},
        "rayzero": {"overlap_weight_gather": lazy},
    }
    return rayzero.initialize(model=model, config=config)[0]


def train_both(rank: int, world: int, stage: int, bf16: bool, offload: bool) -> list[float]:
    """Largest differences between lazy and immediate gathers, after training; and the number of
    gathers that were waited for in a forward."""
    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    results = []
    waited = 0
    with messages_not_shared_memory():
        for lazy in (False, True):
            torch.manual_seed(0)
            model = OddUses()
            engine = build(stage, bf16, lazy, model, **zero)
            train(engine, model, steps=3)
            pending = engine._runtime.lazy_weights
            assert (pending is not None) is lazy
            if pending is not None:
                waited = len(pending._pending)
                assert waited > 3  # launched by the last step, waited for below
            results.append(engine.state_dict())  # waits
            assert pending is None or not pending._pending
            train(engine, model, steps=2)
            engine.wait_weights()
            results[-1] |= {f"later {k}": v.clone() for k, v in model.state_dict().items()}
            engine.close()
    first, second = results
    return [float((first[k] - second[k]).abs().max()) for k in first] + [float(waited)]


@pytest.mark.parametrize(
    ("stage", "bf16", "offload"), [(1, False, False), (2, True, False), (2, True, True)]
)
def test_equals_immediate_gathers(stage: int, bf16: bool, offload: bool) -> None:
    for *differences, waited in run_ranks(2, train_both, stage, bf16, offload):
        assert max(differences) == 0.0
        assert waited > 3


def order_of_waits(rank: int, world: int) -> None:
    """Nothing that a forward reads is still in flight; a gather is left for the module that reads
    it. Where a gather is in flight its weights are NaN here."""
    torch.manual_seed(0)
    model = OddUses()
    with messages_not_shared_memory():
        engine = build(2, False, True, model)
    lazy = engine._runtime.lazy_weights
    assert lazy is not None
    events: list[str] = []

    class Delayed:
        """A work that brings the weights only when it is waited for."""

        def __init__(self, name: str, work: Any, flat: Tensor) -> None:
            work.wait()
            self._name, self._flat, self._value = name, flat, flat.clone()
            flat.fill_(float("nan"))

        def wait(self) -> None:
            events.append(self._name)
            self._flat.copy_(self._value)

    flats = {unit.name: unit.weights.persistent_tensor for unit in engine._runtime.units}
    start = lazy.start
    lazy.start = lambda pending: start(  # type: ignore[method-assign]
        {name: Delayed(name, work, flats[name].data) for name, work in pending.items()}  # type: ignore[misc]
    )
    called = [model.embed, model.attention, model.last]
    for module in called:
        module.register_forward_pre_hook(lambda it, _: events.append(type(it).__name__))
    train(engine, model, steps=1)
    events.clear()
    train(engine, model, steps=1)
    embed, last = model.embed.weight, model.last.weight
    of_embed, of_last = (
        {unit.name for unit in engine._runtime.units if any(it is param for it in unit.params)}
        for param in (embed, last)
    )
    assert of_embed != of_last
    assert min(events.index(name) for name in of_last) > events.index("MultiheadAttention")
    assert max(events.index(name) for name in of_last) == events.index("Linear") - 1
    train(engine, model, steps=2)  # `sometimes` is called now, and was not in the last forward
    assert all(torch.isnan(flat).any() for flat in flats.values())  # in flight again
    engine.wait_weights()
    assert not any(torch.isnan(param).any() for param in model.parameters())
    train(engine, model, steps=1)
    model.last(torch.ones(1, 8))  # a part on its own
    assert not any(torch.isnan(param).any() for param in model.parameters())
    train(engine, model, steps=1)
    with pytest.raises(IndexError):
        engine(torch.tensor([[99]]))
    assert not any(torch.isnan(param).any() for param in model.parameters())


def test_a_gather_is_waited_for_where_its_weights_are_used() -> None:
    run_ranks(2, order_of_waits)


@pytest.mark.parametrize("stage", [0, 3])
def test_is_refused_where_nothing_is_gathered_after_an_update(stage: int) -> None:
    with pytest.raises(ConfigError, match=r"overlap_weight_gather: false at stage"):
        build(stage, False, True, OddUses())


@pytest.mark.parametrize(("stage", "micro_steps"), [(1, 2), (3, 1)])
def test_one_reduction_a_step_is_refused_where_there_is_one(stage: int, micro_steps: int) -> None:
    config = {
        "zero_optimization": {"stage": stage},
        "gradient_accumulation_steps": micro_steps,
        "rayzero": {"reduce_each_micro_step": False},
    }
    with pytest.raises(ConfigError, match=r"reduce_each_micro_step: true, or leave it out"):
        rayzero.initialize(model=OddUses(), optimizer=zoo.sgd, config=config)


def test_a_module_waits_for_its_units_in_launch_order():
    """The same on every rank, though a set of names has another order in each process."""
    module = nn.Module()
    names = [f"bucket{number}" for number in range(12)]
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.zeros(1)))
    units = [SimpleNamespace(name=name, params=(module.get_parameter(name),)) for name in names]
    lazy = LazyWeights(nn.Sequential(module), cast(list[Unit], units))
    waited: list[str] = []
    for launched in (names, names[::-1]):
        waited.clear()
        works = {name: SimpleNamespace(wait=partial(waited.append, name)) for name in launched}
        lazy.start(cast(dict[str, Work], works))
        lazy._in_forward = True
        lazy._before_module(module, ())
        assert waited == launched
