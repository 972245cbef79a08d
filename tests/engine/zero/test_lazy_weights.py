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

from rayzero.engine.comm.backend import Work
from rayzero.engine.errors import ConfigError
from rayzero.engine.zero.lazy_weights import LazyWeights
from rayzero.engine.zero.unit import Unit
from tests.engine.equal import Row, check_equal, evaluating, make, plain, start
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

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for scale in self.scales:
            x = x * scale
        if tokens[0, 0] % 2:
            x = x + self.sometimes(x)
        return F.cross_entropy(
            (self.last(x) @ self.embed.weight.t()).flatten(0, 1), tokens.flatten()
        )


def batches(steps: int) -> list[Tensor]:
    """Each second one needs `sometimes`."""
    drawn = torch.randint(0, 8, (steps, 4, 5), generator=torch.Generator().manual_seed(1))
    drawn[..., 0] = (torch.arange(steps) % 2)[:, None]
    return list(drawn)


@contextmanager
def messages_not_shared_memory() -> Iterator[None]:
    """Gathers proceed in gloo's threads, as on a GPU; through shared memory a rank does its share
    before it returns to the script."""
    os.environ["RAYZERO_SHARED_MEMORY"] = "0"
    try:
        yield
    finally:
        del os.environ["RAYZERO_SHARED_MEMORY"]


LAZY: dict[str, Any] = {
    "samples": 4,
    "zero": {"reduce_bucket_size": 100},
    "rayzero": {"overlap_weight_gather": True},
}


def test_equals_plain_torch() -> None:
    offloaded = {"zero": LAZY["zero"] | {"offload_optimizer": {"device": "cpu"}}}
    rows: list[Row] = [
        (OddUses, plain, LAZY | {"stage": 1}),
        (OddUses, evaluating, LAZY | {"stage": 2}),
        (OddUses, plain, LAZY | {"stage": 2} | offloaded),
    ]
    check_equal(rows, batches(4))


def order_of_waits(rank: int, world: int) -> None:
    """Nothing that a forward reads is still in flight; a gather is left for the module that reads
    it. Where a gather is in flight its weights are NaN here."""
    model = make(OddUses)
    with messages_not_shared_memory():
        engine = start(model, 2, **LAZY)

    def train(*numbers: int) -> None:
        for number in numbers:
            plain(engine, batches(2)[number].chunk(world)[rank])

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
    launched = lazy.start
    lazy.start = lambda pending: launched(  # type: ignore[method-assign]
        {name: Delayed(name, work, flats[name].data) for name, work in pending.items()}  # type: ignore[misc]
    )
    called = [model.embed, model.attention, model.last]
    for module in called:
        module.register_forward_pre_hook(lambda it, _: events.append(type(it).__name__))
    train(0)
    events.clear()
    train(0)
    embed, last = model.embed.weight, model.last.weight
    of_embed, of_last = (
        {unit.name for unit in engine._runtime.units if any(it is param for it in unit.params)}
        for param in (embed, last)
    )
    assert of_embed != of_last
    assert min(events.index(name) for name in of_last) > events.index("MultiheadAttention")
    assert max(events.index(name) for name in of_last) == events.index("Linear") - 1
    train(0, 1)  # `sometimes` is called now, and was not in the last forward
    assert all(torch.isnan(flat).any() for flat in flats.values())  # in flight again
    engine.wait_weights()
    assert not any(torch.isnan(param).any() for param in model.parameters())
    train(0)
    model.last(torch.ones(1, 8, dtype=torch.float64))  # a part on its own
    assert not any(torch.isnan(param).any() for param in model.parameters())
    train(0)
    with pytest.raises(IndexError):
        engine(torch.tensor([[99]]))
    assert not any(torch.isnan(param).any() for param in model.parameters())


def test_a_gather_is_waited_for_where_its_weights_are_used() -> None:
    run_ranks(2, order_of_waits)


@pytest.mark.parametrize(
    ("stage", "micro_steps", "section", "message"),
    [
        (0, 1, LAZY["rayzero"], r"overlap_weight_gather: false at stage"),
        (3, 1, LAZY["rayzero"], r"overlap_weight_gather: false at stage"),
        (1, 2, {"reduce_each_micro_step": False}, r"reduce_each_micro_step: true, or leave it out"),
        (3, 1, {"reduce_each_micro_step": False}, r"reduce_each_micro_step: true, or leave it out"),
    ],
)
def test_a_setting_without_effect_is_refused(
    stage: int, micro_steps: int, section: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        start(OddUses(), stage, gradient_accumulation_steps=micro_steps, rayzero=section)


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
