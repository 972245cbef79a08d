"""The caller's own state: what is stored, and who gets it back when."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rayzero.engine.errors import DataError, EngineError
from rayzero.engine.session import use_session
from rayzero.engine.state.ranges import pack_block
from rayzero.engine.state.registry import StateRegistry
from tests.engine import equal
from tests.engine.state.blocks import Block, BlocksSource, StateSession
from tests.support.ranks import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64]


def make_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
    value = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))
    return value.to(dtype)


numbers = st.integers() | st.floats() | st.booleans() | st.none()
leaves = (
    numbers
    | st.text()
    | st.builds(
        make_tensor,
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 4), max_size=3),
        st.integers(0, 99),
    ).filter(lambda it: it.numel() < 100)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype is other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, list | tuple):
        parts = zip(one, other, strict=True)
        return type(one) is type(other) and all(same(*pair) for pair in parts)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and repr(one) == repr(other)


def stored(
    registry: StateRegistry, rank: int = 0, change: Callable[[], object] = lambda: None
) -> Block:
    registry.capture()
    change()
    block = pack_block(registry.ranges(rank))
    data = bytearray(block.index.nbytes)
    block.copy_to(memoryview(data))
    return Block(block.index, data, json.dumps({"rank": rank, "step": 1}).encode())


def of_values(**values: Any) -> StateRegistry:
    registry = StateRegistry()
    for name, value in values.items():
        registry.register(name, lambda value=value: value, lambda it: None)
    return registry


def restored(blocks: list[Block], rank: int, names: list[str]) -> dict[str, Any]:
    registry, got = StateRegistry(), dict[str, Any]()
    registry.read(BlocksSource(blocks), rank)
    for name in names:
        registry.register(name, lambda: None, lambda value, name=name: got.update({name: value}))
    return got


@settings(max_examples=40, deadline=None)
@given(values, values)
def test_values_come_back_as_torch_load_reads_them(one: Any, other: Any):
    file = io.BytesIO()
    torch.save({"one": one, "other": other}, file)
    file.seek(0)
    expected = torch.load(file, weights_only=True)
    got = restored([stored(of_values(one=one, other=other))], 0, ["one", "other"])
    assert same(got, expected)


def test_numpy_values_and_parameters():
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    value = {"array": array, "scalar": np.int16(3), "zero": np.float64("nan"), "empty": array[:0]}
    value["parameter"] = nn.Parameter(torch.ones(2))
    got = restored([stored(of_values(it=value))], 0, ["it"])["it"]
    assert np.array_equal(got["array"], array)
    assert got["array"].flags.writeable
    assert (got["scalar"], got["scalar"].dtype) == (3, np.int16)
    assert np.isnan(got["zero"])
    assert got["empty"].shape == (0, 2)
    assert type(got["parameter"]) is Tensor
    assert not got["parameter"].requires_grad


def test_what_was_captured_does_not_follow_the_value():
    weights = torch.zeros(3)
    registry = of_values(weights=weights)
    block = stored(registry, change=lambda: weights.add_(1))
    assert restored([block], 0, ["weights"])["weights"].tolist() == [0, 0, 0]


def test_memory_grows_seldom_and_by_little():
    registry, history, moves = StateRegistry(), list[float](), set[tuple[tuple[int, int], ...]]()
    registry.register("history", lambda: history, lambda it: None)
    for step in range(6000):
        history.append(step / 3)
        if step % 50 == 0:
            registry.capture()
            moves.add(registry.memory_signature)
    nbytes = registry.memory_signature[0][1]
    assert len(moves) < 60
    assert nbytes < 1.2 * len(json.dumps(history))
    assert restored([stored(registry)], 0, ["history"])["history"] == history


def test_each_rank_gets_its_own_values_and_a_new_one_rank_0s():
    blocks = [stored(of_values(best=0.5, seen=7), 0), stored(of_values(seen=8), 1)]
    first, second, *others = (restored(blocks, rank, ["seen", "best"]) for rank in range(4))
    assert first == {"seen": 7, "best": 0.5}
    assert second == {"seen": 8}
    assert others == [first, first]


def test_set_is_called_once_before_or_after_the_state_is_read():
    blocks = [stored(of_values(seen=7))]
    early, late = list[int](), list[int]()
    registry = StateRegistry()
    registry.register("seen", lambda: 0, early.append)
    registry.read(BlocksSource(blocks), 0)
    assert early == [], "the weights are not there yet"
    registry.deliver()
    registry.deliver()
    assert early == [7]
    other = StateRegistry()
    other.register("seen", lambda: 0, late.append)
    read = StateRegistry()
    read.read(BlocksSource(blocks), 0)
    other.take_over(read)
    assert late == [7]


def test_a_value_that_was_not_given_yet_is_stored_again():
    """The ranks have changed again before the values were given."""
    registry = of_values(seen=9)
    registry.read(BlocksSource([stored(of_values(seen=7))]), 0)
    assert restored([stored(registry)], 0, ["seen"]) == {"seen": 7}


def test_every_rank_gets_the_shared_values_of_all():
    blocks, got = list[Block](), list[Any]()
    for rank in range(3):
        registry = of_values(own=rank)
        registry.register("shared", lambda rank=rank: {"at": rank}, lambda it: None, shared=True)
        assert registry.is_shared
        blocks.append(stored(registry, rank))
    everything = [{"at": rank} for rank in range(3)]
    for rank in (1, 5):
        registry = of_values(own=None)
        registry.register("shared", lambda: got[-1], got.append, shared=True)
        registry.read(BlocksSource(blocks), rank)
        registry.capture()  # before the values are given: the ranks have changed again
        block = stored(registry)  # before the values are given: the ranks have changed again
        assert got.pop() == everything
        assert restored([block], 0, ["own"]) == {"own": rank if rank < 3 else 0}
    late = StateRegistry()
    late.read_shared(BlocksSource(blocks))
    late.register("shared", list, got.append, shared=True)
    assert got == [everything]


def test_shared_values_are_in_the_order_of_ranks():
    blocks, got = list[Block](), list[Any]()
    for rank in range(12):
        registry = StateRegistry()
        registry.register("shared", lambda rank=rank: rank, lambda it: None, shared=True)
        blocks.append(stored(registry, rank))
    loaded = StateRegistry()
    loaded.register("shared", list, got.append, shared=True)
    loaded.read(BlocksSource(blocks), 0)
    loaded.deliver()
    assert got == [list(range(12))]


def test_what_nobody_registers_is_told_once_and_dropped(caplog: pytest.LogCaptureFixture):
    registry = of_values(seen=1)
    registry.read(BlocksSource([stored(of_values(seen=7, ema=1.0, best=2.0))]), 0)
    registry.deliver()
    assert caplog.records == []
    registry.capture()
    registry.capture()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the restored state has 'ema', 'best', which this call" in record.getMessage()
    late = list[Any]()
    registry.register("ema", lambda: 0, late.append)
    assert late == []
    for rank in (1, 2):  # of another rank: this one need not have the same names
        registry.read(BlocksSource([stored(of_values(best=2.0))]), rank)
        registry.capture()
    assert len(caplog.records) == 1


def test_state_without_registered_values_calls_nothing():
    plain = Block(pack_block([]).index, bytearray(), b'{"rank": 0, "step": 1}')
    foreign = Block(plain.index, plain.data, b'{"step": 1}')
    for block in (plain, foreign):
        assert restored([block], 0, ["seen"]) == {}


def test_damaged_bytes_are_an_error():
    block = stored(of_values(seen=7))
    block.data[8] = 0
    with pytest.raises(DataError, match="the registered state of the saved state is not valid"):
        restored([block], 0, ["seen"])


@pytest.mark.parametrize(
    ("name", "get", "set_", "message"),
    [
        ("", list, list, "state is registered as ''\n  allowed: a name: text"),
        (3, list, list, "state is registered as 3"),
        ("a", 1, list, "state 'a': get is a int\n  allowed: get: a function"),
        ("a", list, None, "state 'a': set is a NoneType"),
        ("taken", list, list, "state 'taken' is registered twice"),
    ],
)
def test_wrong_registration_is_refused(name: Any, get: Any, set_: Any, message: str):
    registry = of_values(taken=1)
    with pytest.raises(EngineError, match="state") as error:
        registry.register(name, get, set_)
    assert message in str(error.value)


def deep() -> list[Any]:
    value: list[Any] = []
    value.append({"self": value})
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (threading.Lock(), "state 'it': value is a _thread.lock, which a checkpoint cannot hold"),
        ({"a": [1, {2: object()}]}, "state 'it': value['a'][1][2] is a builtins.object"),
        ({"model": nn.Linear(1, 1)}, "value['model'] is a torch.nn.modules.linear.Linear"),
        ([torch.eye(2).to_sparse()], "value[0] is a torch.Tensor"),
        (torch.empty(2, device="meta"), "value is a torch.Tensor"),
        (deep(), "value[0]['self'] contains itself"),
    ],
)
def test_what_cannot_be_stored_is_named(value: Any, message: str):
    with pytest.raises(EngineError) as error:
        of_values(it=value).capture()
    assert message in str(error.value)


def make_engine() -> Any:
    return equal.start(equal.make(lambda: nn.Linear(4, 4)), 2, samples=12)


def train(engine: Any, steps: int) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.ones(12 // engine.world_size, 4).double()).sum())
        engine.step()


def value_of(rank: int, step: int) -> dict[str, Any]:
    return {"rank": rank, "step": step, "weights": torch.full((1000,), 10.0 * rank + step)}


def register(engine: Any) -> list[Any]:
    got: list[Any] = []
    engine.state.register("own", lambda: value_of(engine.rank, engine.global_steps), got.append)
    return got


def save_at_another_size(rank: int, world: int, folder: str, before: int, steps: int) -> list[Any]:
    engine = make_engine()
    early = register(engine)
    if steps:
        engine.load_checkpoint(folder)
        assert engine.global_steps == steps
    train(engine, 2)
    engine.save_checkpoint(folder)
    late_engine = make_engine()  # registers after the load
    late_engine.load_checkpoint(folder)
    (late,) = register(late_engine)
    assert same(late, value_of(rank, steps + 2))
    if not steps:
        assert early == [], "a fresh start"
        return []
    (value,) = early
    assert same(value, value_of(rank if rank < before else 0, steps))
    return [rank]


def test_checkpoints_give_values_back_at_any_world_size(tmp_path: Any):
    before = 0
    for number, size in enumerate((1, 3, 2)):
        args = (str(tmp_path), before, 2 * number)
        results = run_ranks(size, save_at_another_size, *args)
        assert results == [[rank] if number else [] for rank in range(size)]
        before = size


def test_a_load_of_parts_leaves_the_callers_values(tmp_path: Any):
    engine = make_engine()
    got = register(engine)
    train(engine, 1)
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, load_module_only=True)
    assert got == []
    engine.load_checkpoint(tmp_path)
    assert len(got) == 1
    other = make_engine()
    assert other.progress.place_asked_at is None
    other.load_checkpoint(tmp_path)
    assert other.progress.place_asked_at == 0, "a job's script finds its place by itself from now"


def test_an_engine_that_goes_back_gets_the_older_values_once():
    """One that is re-cut at the step that it has finished keeps its caller's values."""
    engine = make_engine()
    got = register(engine)
    shared: list[Any] = []
    engine.state.register("shared", lambda: 7, shared.append, shared=True)
    train(engine, 2)
    second = Block.of(engine)
    engine.survival.recut(BlocksSource([second]), keep=False)
    assert got == []
    assert shared == [[7]], "of ranks that are gone, too"
    train(engine, 1)
    engine.survival.recut(BlocksSource([second]), keep=False)
    engine.survival.recut(BlocksSource([second]), keep=False)
    assert engine.global_steps == 2
    assert engine.progress.lost_steps == 1
    assert len(got) == 1
    assert same(got[0], value_of(0, 2))


class Reforms(StateSession):
    """Re-cuts its engine at the step that it has finished."""

    engine: Any = None

    def reform(self) -> None:
        self.engine.survival.recut(BlocksSource([Block.of(self.engine)]), keep=True)


def test_a_step_that_is_lost_is_counted_and_changes_no_value_of_the_caller():
    session = Reforms()
    with use_session(session):
        engine = session.engine = make_engine()
    got, broken = register(engine), list[str]()
    train(engine, 1)
    engine.survival.enable(broken.append)
    engine.backward(engine(torch.ones(12, 4).double()).sum())
    engine.survival.break_group("a rank was lost")
    engine.step()
    assert broken == ["a rank was lost"]
    assert (engine.global_steps, engine.was_step_applied()) == (1, False)
    train(engine, 1)
    assert (engine.global_steps, engine.progress.lost_steps) == (2, 1)
    assert got == []


def test_a_host_takes_over_what_is_registered_with_an_engine() -> None:
    own, host = StateRegistry(), StateRegistry()
    own.register("stream", lambda: 1, lambda value: None)
    host.take_over(own)
    host.register("other", lambda: 2, lambda value: None)
    host.capture()
    assert "stream" in host
    assert host.ranges(0)
