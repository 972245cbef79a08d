"""The engine's public API and the errors of its misuse."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import rayzero
from rayzero.engine.data.sampling import SampleOrder
from rayzero.engine.errors import ConfigError, DataError, EngineError, RayzeroError
from tests.engine import zoo
from tests.engine.equal import assert_equal, normal_batches, start, train_reference
from tests.support.covering import covering
from tests.support.ranks import run_ranks

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


def config(stage: int = 2, **overrides: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": ADAMW,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100},
        **overrides,
    }


def initialize(model: Any, overrides: Any = (), **options: Any) -> rayzero.Engine:
    return rayzero.initialize(model=model, config=config(**dict(overrides)), **options)[0]


def make_engine(**overrides: Any) -> rayzero.Engine:
    return initialize(nn.Linear(3, 1), overrides)


def compute_loss(engine: rayzero.Engine, batch: Tensor) -> Tensor:
    return engine(batch[:, :-1], targets=batch[:, 1:])["loss"]


def train_on_a_second_engine(rank: int, world: int, stage: int, destroyed: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    other = copy.deepcopy(model)
    engine = start(model, stage)
    for part in (model, model[0], nn.ModuleList([nn.Linear(2, 2), model[1]])):
        with pytest.raises(ConfigError, match="engine trains: that of Sequential, at stage"):
            start(part, stage)
    if destroyed:
        engine.destroy()
        kept = engine  # noqa: F841
    del engine
    engine, batches = start(model, stage), normal_batches(3, 4)
    for batch in batches:
        squared(engine, batch)
    assert_equal(engine.state_dict(), train_reference(other, batches, squared))


def squared(engine: Any, batch: Tensor) -> None:
    engine.backward(engine(batch).square().mean())
    engine.step()


@pytest.mark.parametrize("destroyed", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_engine_trains_a_parameter(stage: int, destroyed: bool) -> None:
    """Two would both take its gradients: a second one is refused, unless the first is gone."""
    run_ranks(1, train_on_a_second_engine, stage, destroyed)


@pytest.mark.parametrize(
    "mistake", [{"lr_scheduler": 3}, {"training_data": []}, {"training_data": iter([])}]
)
def test_failed_initialize_leaves_the_model(mistake: dict[str, Any]) -> None:
    """As in a notebook, which keeps the error's frames, and where the cell is run again."""
    model = nn.Linear(3, 1)
    with pytest.raises((ConfigError, DataError)) as kept:
        initialize(model, **mistake)
    engine = initialize(model)
    engine.backward(engine(torch.ones(2, 3)).mean())
    engine.step()
    assert engine.metrics.grad_norm == pytest.approx(2.0)
    del kept


def test_engines_may_share_frozen_parameters() -> None:
    shared = nn.Linear(3, 3).requires_grad_(False)
    for engine in [initialize(nn.Sequential(shared, nn.Linear(3, 1))) for _ in range(2)]:
        engine.backward(engine(torch.ones(2, 3)).mean())
        engine.step()


def of_used_optimizer() -> rayzero.Engine:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return initialize(model, optimizer=optimizer)


def of_linear(name: str) -> rayzero.Engine:
    model = nn.Linear(3, 1, bias=False)
    return initialize(model, optimizer=getattr(torch.optim, name)(model.parameters()))


WHOLE = "Muon does not update each element independently"
MISUSES: list[tuple[Callable[[], Any], type[RayzeroError], str]] = [
    (lambda: make_engine().step(), EngineError, "without a backward"),
    (lambda: (it := make_engine()).backward(it(torch.ones(2, 3))), EngineError, "a scalar loss"),
    (
        lambda: (it := make_engine()).backward(it(torch.ones(2, 3)).sum().detach()),
        EngineError,
        "a scalar loss",
    ),
    (lambda: initialize(nn.Linear(3, 1).requires_grad_(False)), ConfigError, "nothing to train"),
    (
        lambda: initialize(nn.Linear(3, 1), model_parameters=nn.Linear(2, 2).parameters()),
        ConfigError,
        "is not a parameter of the model",
    ),
    (of_used_optimizer, ConfigError, "has already taken steps"),
    (
        lambda: make_engine(optimizer={"type": "AdamW", "params": {"learning_rate": 1}}),
        ConfigError,
        r"optimizer\.params.*learning_rate",
    ),
    (
        lambda: initialize(nn.Linear(3, 1, bias=False), optimizer=torch.optim.Muon),
        ConfigError,
        WHOLE,
    ),
    (lambda: of_linear("Muon"), ConfigError, WHOLE),
    (lambda: of_linear("LBFGS"), ConfigError, "LBFGS"),
    (lambda: of_linear("Adafactor"), ConfigError, "Adafactor"),
    (lambda: initialize(None), ConfigError, r"torch\.nn\.Module"),
    (lambda: initialize(lambda: 3), ConfigError, r"torch\.nn\.Module"),
]


@pytest.mark.parametrize(("call", "error", "message"), MISUSES)
def test_misuse_is_an_error(
    call: Callable[[], Any], error: type[RayzeroError], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_parameters_outside_groups_are_frozen_with_a_warning(caplog: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    before = model[0].weight.clone()
    engine = initialize(model, model_parameters=model[1].parameters())
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    assert "0.weight, 0.bias" in caplog.text
    assert torch.equal(model[0].weight, before)


def test_client_optimizer_keeps_its_scheduler() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    engine, returned, _, schedule = rayzero.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config(optimizer=None)
    )
    assert engine.metrics.loss is None
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
    assert returned is engine.optimizer
    assert returned.optimizer is optimizer
    assert schedule is scheduler
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert engine.metrics.lr == 0.25  # of the last step
    assert engine.metrics.to_flat_dict()["bytes/model_weights"] > 0


def test_the_public_names_are_few() -> None:
    assert len([name for name in vars(rayzero.Engine) if not name.startswith("_")]) <= 27


def train_with_overflow(rank: int, world: int, stage: int, bf16: bool) -> None:
    """Only rank 1's gradient overflows, and only in the first step."""
    engine = initialize(zoo.make_model(), {"stage": stage, "bf16": {"enabled": bf16}})
    states = [engine.state_dict()]
    for step in range(2):
        (batch,) = zoo.batches(1, 2)
        loss = compute_loss(engine, batch)
        engine.backward(loss * float("inf") if rank == 1 and step == 0 else loss)
        engine.step()
        states.append(engine.state_dict())
    before, first, second = states
    assert all(torch.equal(first[name], before[name]) for name in before)
    assert rank or not all(torch.equal(second[name], before[name]) for name in before)
    assert (engine.metrics.skipped_steps, engine.metrics.step) == (1, 2)
    assert math.isfinite(engine.metrics.loss)  # of the second step


@pytest.mark.parametrize(
    ("stage", "bf16"), [(0, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
)
def test_overflow_skips_step_on_every_rank(stage: int, bf16: bool) -> None:
    run_ranks(2, train_with_overflow, stage, bf16)


def train_with_no_sync(
    rank: int, world: int, stage: int
) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    model = zoo.make_model(torch.float64)
    engine = rayzero.Engine.build(
        model, zoo.sgd, model_parameters=zoo.two_groups(model), config=config(stage)
    )
    for batch in zoo.batches(4, 12):
        first, second, third = batch.chunk(world)[rank].chunk(3)
        with engine.no_sync():
            for part in (first, second):
                engine.backward(compute_loss(engine, part) / 3)
            with pytest.raises(EngineError):
                engine.step()
        engine.backward(compute_loss(engine, third) / 3)
        engine.step()
    return engine.state_dict(), engine.metrics.collectives, len(engine._runtime.units)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_sync_accumulates_at_every_stage(stage: int) -> None:
    _, expected = zoo.train_reference(
        zoo.make_model(torch.float64), zoo.sgd, list(zoo.batches(4, 12))
    )
    state, traffic, buckets = run_ranks(2, train_with_no_sync, stage)[0]
    assert max(zoo.relative_error(state[name], expected[name]) for name in expected) < 1e-9
    if stage <= 1:  # reduced once per step, not within no_sync
        reductions = traffic["all_reduce" if stage == 0 else "reduce_scatter"]
        assert traffic["vote"]["calls"] == 4
        assert reductions["calls"] == 4 * buckets


class TokenDataset(Dataset):
    """Random tokens, seeded by the index."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, zoo.VOCAB, (6,), generator=torch.Generator().manual_seed(index))


def train_with_loader(rank: int, world: int, stage: int, micro_batch: int) -> dict[str, Any]:
    model = zoo.make_model(torch.float64)
    engine, _, loader, _ = rayzero.initialize(
        model=model,
        model_parameters=zoo.two_groups(model),
        optimizer=zoo.adamw,
        training_data=TokenDataset(),
        config=config(stage, train_batch_size=7, train_micro_batch_size_per_gpu=micro_batch),
    )
    for batch in loader.steps(10):
        engine.backward(compute_loss(engine, batch))
        engine.step()
    assert engine.progress.sample_cursor == 70
    return engine.state_dict()


AXES = {"stage": (0, 2, 3), "world": (0, 2, 3), "micro_batch": (1, 2, 7)}


@pytest.mark.parametrize(
    tuple(AXES), [tuple(row[axis] for axis in AXES) for row in covering(AXES, 2)]
)
def test_global_batch_is_independent_of_world_size(
    stage: int, world: int, micro_batch: int
) -> None:
    """Two and three ranks cannot split seven samples evenly."""
    order, data = SampleOrder(23, 0), TokenDataset()
    global_batches = [
        torch.stack([data[i] for i in order.indices(7 * step, 7).tolist()]) for step in range(10)
    ]
    _, expected = zoo.train_reference(zoo.make_model(torch.float64), zoo.adamw, global_batches)
    state = run_ranks(world, train_with_loader, stage, micro_batch)[0]
    assert max(zoo.relative_error(state[name], expected[name]) for name in expected) < 1e-9
