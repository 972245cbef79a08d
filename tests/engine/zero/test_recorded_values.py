"""Values of what `zero_init` built before there is an engine: those of plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import rayzero
from rayzero.engine.api.params import GatheredParameters, Init
from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.zero.deferred_init import Materializer, zero_init
from tests.engine.zoo import Tied
from tests.support.ranks import run_ranks


def written(target: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    write(target)
    return target


def outside(values: list[float]) -> Tensor:
    """A tensor with memory, also inside `zero_init`."""
    return torch.from_numpy(np.array(values, dtype=np.float32))


READS: dict[str, Callable[[Tensor], Any]] = {
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: [*x.numpy(), *np.asarray(x)],
    "repr": lambda x: f"{x} {x.view(2, 2)!r} {nn.Parameter(x)} {x[1]:.3f}",
    "equal": lambda x: (torch.equal(x, x + 0), torch.equal(x, x + 1), torch.allclose(x, x)),
    "nonzero": lambda x: (x > 0).nonzero().tolist(),
    "mask": lambda x: x[x > 0] * 2,
    "unique": lambda x: x.sign().unique(),
    "written mask": lambda x: written(x.clone(), lambda it: it.__setitem__(it > 0, 7.0)),
    "copied": lambda x: written(outside([1, 2, 3, 4]), lambda it: it.copy_(x)),
    "item": lambda x: written(outside([1, 2]), lambda it: it.__setitem__(1, x[2])),
    "out": lambda x: written(outside([0] * 4), lambda it: torch.add(x, x, out=it)),
    "two outs": lambda x: torch.sort(x, out=(outside([0] * 4), torch.empty(4, dtype=torch.int64)))[
        1
    ].tolist(),
    "foreach": lambda x: written(outside([1, 1]), lambda it: torch._foreach_add_([it], [x[:2]])),
    "random": lambda x: written(outside([0] * 4), lambda it: it.copy_(torch.rand(4))) + x,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_needs_values_has_them(read: Callable[[Tensor], Any]) -> None:
    def run() -> tuple[Any, float]:
        torch.manual_seed(5)
        result = read(torch.randn(4))
        result = result.tolist() if isinstance(result, Tensor) else result
        return result, torch.rand(1).item()

    expected = run()
    with zero_init():
        actual = run()
    assert actual == expected


def test_source_that_changes_and_foreign_meta_tensors_are_errors() -> None:
    source, foreign = torch.ones(3), torch.empty(3, device="meta")
    with zero_init():
        model = nn.Linear(3, 1)
        model.weight.data.copy_(source)
        model.bias.data.copy_(foreign.sum())
    source.add_(1)
    values = Materializer(model, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"copy_.* has changed since\n.*clone"):
        values.initial_value(model.weight)
    with pytest.raises(ConfigError, match=r"shape \(3,\) on the meta device has no values"):
        values.initial_value(model.bias)


def make_pair() -> tuple[Tied, Tied]:
    torch.manual_seed(8)
    expected = Tied()
    torch.manual_seed(8)
    with zero_init():
        return expected, Tied()


def same(state: dict[str, Tensor], expected: nn.Module) -> bool:
    wanted = expected.state_dict()
    return list(state) == list(wanted) and all(torch.equal(state[it], wanted[it]) for it in wanted)


def test_a_model_without_engine_is_saved(tmp_path: Path) -> None:
    expected, model = make_pair()
    torch.save(model.state_dict(), tmp_path / "w.pt")
    loaded = torch.load(tmp_path / "w.pt")
    assert same(loaded, expected)
    sizes = {
        it.untyped_storage().data_ptr() for it in (loaded["embed.weight"], loaded["head.weight"])
    }
    assert len(sizes) == 1  # tied weights are saved once, as plain torch does
    assert same(copy.deepcopy(model.state_dict()), expected)
    state = model.state_dict()
    del state["head.weight"]
    save_file(state, tmp_path / "w.safetensors")
    assert torch.equal(load_file(tmp_path / "w.safetensors")["embed.weight"], expected.embed.weight)
    plain = Tied()
    plain.load_state_dict(model.state_dict())
    assert same(plain.state_dict(), expected)
    with zero_init():
        torch.save(model.state_dict(), tmp_path / "w.pt")
    assert same(torch.load(tmp_path / "w.pt"), expected)


def test_a_write_to_a_state_dict_changes_the_model() -> None:
    expected, model = make_pair()
    for each in (expected, model):
        state = each.state_dict()
        assert state["embed.weight"].sum().isfinite()  # read before
        state["embed.weight"][1] = 5
        state["embed.weight"] += 1
        state["norm.bias"].copy_(state["embed.weight"][2])
        torch._foreach_mul_([state["norm.weight"], state["norm.bias"]], 3.0)
        torch.add(state["norm.bias"], 1, out=state["norm.running_mean"])
    assert same(model.state_dict(), expected)
    assert same(state, expected)


def save_on_each_rank(rank: int, world: int, folder: str) -> None:
    _, model = make_pair()
    state = model.state_dict()
    if rank == 0:
        torch.save(state, f"{folder}/w.pt")
    else:
        with pytest.raises(ConfigError, match=r"rank 1 used a weight.*\n.*rank 0"):
            torch.save(state, f"{folder}/other.pt")
    assert state["embed.weight"].shape == (50, 8)
    engine, *_ = rayzero.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 3},
        },
    )
    with pytest.raises(ConfigError, match=r"after initialize.*\n.*engine\.state_dict"):
        state["norm.bias"].sum()
    with pytest.raises(EngineError, match=r"engine\.state_dict"):
        torch.save(model.state_dict(), f"{folder}/other.pt")
    engine.close()


def test_one_rank_saves_a_model_without_engine(tmp_path: Path) -> None:
    run_ranks(2, save_on_each_rank, str(tmp_path))
    assert same(torch.load(tmp_path / "w.pt"), make_pair()[0])


def test_gathering_that_fails_records_nothing_afterwards() -> None:
    with Init():
        model = nn.Linear(2, 2)
    gathered = GatheredParameters([model.weight, nn.Parameter(torch.ones(1))], modifier_rank=1)
    with pytest.raises(EngineError, match="on 1 ranks\n  allowed: 0 to 0"):
        gathered.__enter__()
    assert torch.empty(1, device="meta").is_meta
    assert torch.ones(1).device.type == "cpu"
