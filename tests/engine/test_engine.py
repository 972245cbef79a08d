"""The engine's public API and the errors of its misuse."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import rayzero
from rayzero.engine.errors import ConfigError, DataError, EngineError
from tests.engine import zoo
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


def make_engine(**overrides: Any) -> rayzero.Engine:
    return rayzero.initialize(model=nn.Linear(3, 1), config=config(**overrides))[0]


def compute_loss(engine: rayzero.Engine, batch: Tensor) -> Tensor:
    return engine(batch[:, :-1], targets=batch[:, 1:])["loss"]


def train_on_a_second_engine(rank: int, world: int, stage: int, destroyed: bool) -> float:
    """The greatest difference of the weights from plain torch's; the first engine is gone."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    plain = copy.deepcopy(model)
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    settings = config(stage, optimizer=sgd, train_micro_batch_size_per_gpu=4)
    engine = rayzero.initialize(model=model, config=settings)[0]
    for part in (model, model[0], nn.ModuleList([nn.Linear(2, 2), model[1]])):
        with pytest.raises(ConfigError, match="engine trains: that of Sequential, at stage"):
            rayzero.initialize(model=part, config=settings)
    if destroyed:
        engine.destroy()
        kept = engine  # noqa: F841
    del engine
    engine = rayzero.initialize(model=model, config=settings)[0]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        batch = torch.arange(16.0).reshape(4, 4).double() / (7 + step)
        optimizer.zero_grad()
        plain(batch).square().mean().backward()
        optimizer.step()
        engine.backward(engine(batch).square().mean())
        engine.step()
    trained = engine.state_dict()
    differences = [
        (trained[name] - value).abs().max() for name, value in plain.state_dict().items()
    ]
    return max(differences).item()


@pytest.mark.parametrize("destroyed", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_engine_trains_a_parameter(stage: int, destroyed: bool) -> None:
    """Two would both take its gradients: a second one is refused, unless the first is gone."""
    (difference,) = run_ranks(1, train_on_a_second_engine, stage, destroyed)
    assert difference < 1e-12


@pytest.mark.parametrize(
    "mistake", [{"lr_scheduler": 3}, {"training_data": []}, {"training_data": iter([])}]
)
def test_failed_initialize_leaves_the_model(mistake: dict[str, Any]) -> None:
    """As in a notebook, which keeps the error's frames, and where the cell is run again."""
    model = nn.Linear(3, 1)
    with pytest.raises((ConfigError, DataError)) as kept:
        rayzero.initialize(model=model, config=config(), **mistake)
    engine, *_ = rayzero.initialize(model=model, config=config())
    engine.backward(engine(torch.ones(2, 3)).mean())
    engine.step()
    assert engine.metrics.grad_norm == pytest.approx(2.0)
    del kept


def test_engines_may_share_frozen_parameters() -> None:
    shared = nn.Linear(3, 3).requires_grad_(False)
    engines = [
        rayzero.initialize(model=nn.Sequential(shared, nn.Linear(3, 1)), config=config(stage=1))[0]
        for _ in range(2)
    ]
    for engine in engines:
        engine.backward(engine(torch.ones(2, 3)).mean())
        engine.step()


class TestMisuse:
    def test_step_needs_backward(self) -> None:
        with pytest.raises(EngineError, match="without a backward"):
            make_engine().step()

    @pytest.mark.parametrize("transform", [lambda out: out, lambda out: out.sum().detach()])
    def test_backward_needs_scalar_with_graph(self, transform: Any) -> None:
        engine = make_engine()
        with pytest.raises(EngineError, match="a scalar loss"):
            engine.backward(transform(engine(torch.ones(2, 3))))

    def test_model_without_trainable_parameters(self) -> None:
        with pytest.raises(ConfigError, match="nothing to train"):
            rayzero.initialize(model=nn.Linear(3, 1).requires_grad_(False), config=config())

    def test_parameter_of_another_model(self) -> None:
        with pytest.raises(ConfigError, match="is not a parameter of the model"):
            rayzero.initialize(
                model=nn.Linear(3, 1),
                model_parameters=nn.Linear(2, 2).parameters(),
                config=config(),
            )

    def test_used_optimizer(self) -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        with pytest.raises(ConfigError, match="has already taken steps"):
            rayzero.initialize(model=model, optimizer=optimizer, config=config())

    def test_wrong_optimizer_argument(self) -> None:
        section = {"type": "AdamW", "params": {"learning_rate": 1}}
        with pytest.raises(ConfigError, match=r"optimizer\.params.*learning_rate"):
            rayzero.initialize(model=nn.Linear(3, 1), config=config(optimizer=section))

    @pytest.mark.parametrize("name", ["LBFGS", "Muon", "Adafactor"])
    def test_optimizer_that_needs_whole_parameters(self, name: str) -> None:
        model = nn.Linear(3, 1, bias=False)
        with pytest.raises(ConfigError, match=f"{name} does not update each element independently"):
            rayzero.initialize(model=model, optimizer=getattr(torch.optim, name), config=config())
        optimizer = getattr(torch.optim, name)(model.parameters())
        with pytest.raises(ConfigError, match=name):
            rayzero.initialize(model=model, optimizer=optimizer, config=config())

    @pytest.mark.parametrize("model", [None, 3, lambda: 3])
    def test_not_a_model(self, model: Any) -> None:
        with pytest.raises(ConfigError, match=r"torch\.nn\.Module"):
            rayzero.initialize(model=model, config=config())


class TestPublicApi:
    def test_parameters_outside_groups_are_frozen_with_a_warning(self, caplog: Any) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        before = model[0].weight.clone()
        engine, *_ = rayzero.initialize(
            model=model, model_parameters=model[1].parameters(), config=config()
        )
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
        assert "0.weight, 0.bias" in caplog.text
        assert torch.equal(model[0].weight, before)

    def test_client_optimizer_keeps_its_scheduler(self) -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        engine, returned, _, schedule = rayzero.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config(optimizer=None)
        )
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 3)).sum())
            engine.step()
        assert returned is engine.optimizer
        assert returned.optimizer is optimizer
        assert schedule is scheduler
        assert optimizer.param_groups[0]["lr"] == 0.125
        assert engine.metrics.lr == 0.25  # of the last step

    def test_train_and_eval(self) -> None:
        engine = make_engine()
        assert not engine.eval().module.training
        assert engine.train().module.training

    def test_metrics(self) -> None:
        engine = make_engine()
        assert engine.metrics.loss is None
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
        flat = engine.metrics.to_flat_dict()
        assert flat["step"] == 1
        assert flat["samples"] == 2
        assert flat["bytes/optimizer_state"] > 0
        assert all(isinstance(value, int | float) for value in flat.values())

    def test_close_releases_model(self) -> None:
        engine = make_engine()
        engine.close()
        engine.module(torch.ones(2, 3)).sum().backward()
        assert engine.module.weight.grad is not None


def train_with_overflow(
    rank: int, world: int, stage: int, bf16: bool
) -> tuple[list[Tensor], list[Tensor], Any]:
    settings = config(stage, bf16={"enabled": bf16})
    engine, *_ = rayzero.initialize(model=zoo.make_model(), config=settings)
    before = engine.state_dict()
    for step in range(2):
        for batch in zoo.batches(1, 2):
            loss = compute_loss(engine, batch)
            # Only rank 1's gradient overflows, and only in the first step.
            engine.backward(loss * float("inf") if rank == 1 and step == 0 else loss)
            engine.step()
        if step == 0:
            after_first = engine.state_dict()
    after_second = engine.state_dict()
    names = list(before)
    return (
        [after_first[name] - before[name] for name in names],
        [after_second[name] - before[name] for name in names],
        (engine.metrics.skipped_steps, engine.metrics.step, engine.metrics.loss),
    )


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overflow_skips_step_on_every_rank(stage: int, bf16: bool) -> None:
    results = run_ranks(2, train_with_overflow, stage, bf16)
    first_changes, total_changes, _ = results[0]
    assert not any(change.any() for change in first_changes)
    assert any(change.any() for change in total_changes)
    for _, _, (skipped, step, loss) in results:
        assert (skipped, step) == (1, 2)
        assert not math.isnan(loss)  # of the second step


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
        votes = traffic["vote"]["calls"]
        assert votes == 4
        assert reductions["calls"] == votes * buckets


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_sync_is_refused_where_deepspeed_refuses_it(stage: int) -> None:
    engine = make_engine(zero_optimization={"stage": stage})
    if stage > 1:
        with pytest.raises(EngineError, match=r"(?s)stage \d.*accumulation_boundary"):
            engine.no_sync()
        return
    with engine.no_sync():
        with pytest.raises(EngineError, match="inside no_sync"), engine.no_sync():
            pytest.fail("entered twice")
        assert engine.inside_no_sync_ctxt
    assert not engine.inside_no_sync_ctxt


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
    from rayzero.engine.data.sampling import SampleOrder

    order, data = SampleOrder(23, 0), TokenDataset()
    global_batches = [
        torch.stack([data[i] for i in order.indices(7 * step, 7).tolist()]) for step in range(10)
    ]
    _, expected = zoo.train_reference(zoo.make_model(torch.float64), zoo.adamw, global_batches)
    state = run_ranks(world, train_with_loader, stage, micro_batch)[0]
    assert max(zoo.relative_error(state[name], expected[name]) for name in expected) < 1e-9


class SkippingModel(nn.Module):
    """Skips a layer of choice, so that ranks may use different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor, skip: int) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == skip else torch.tanh(layer(x))
        return x.square().mean()


def train_with_user_collectives(rank: int, world: int, stage: int) -> None:
    """Ranks use different parameters; user collectives run between the engine's."""
    engine, *_ = rayzero.initialize(
        model=SkippingModel(),
        config={
            "gradient_clipping": 0,
            "optimizer": ADAMW,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 4200},
        },
    )
    for _ in range(3):
        # Stage 3 gathers weights with collectives, so every rank must call every block.
        loss = engine(torch.randn(2, 64), skip=5 if rank and stage < 3 else -1)
        dist.all_reduce(loss.detach().clone())
        engine.backward(loss)
        dist.all_reduce(loss.detach())
        engine.step()
        dist.barrier()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_user_collectives_do_not_interfere(stage: int) -> None:
    run_ranks(2, train_with_user_collectives, stage, timeout_s=300)
