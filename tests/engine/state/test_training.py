"""What an engine that resumes continues with: weights, buffers, schedule, random numbers, sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero.engine.session import StepRequests, use_session
from tests.engine.state.blocks import Block, StateSession
from tests.support.ranks import run_ranks


def config(**overrides: Any) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
    return {"train_batch_size": 4, "optimizer": optimizer} | overrides


class DropoutModel(nn.Module):
    """Frozen layer, persistent and other buffers, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.norm, self.dropout = nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(self.frozen(self.first(x)))).square().mean()


def train_dropout_steps(
    rank: int, world: int, stage: int, steps: range, blocks: list[Block] | None
) -> tuple[Block, dict[str, Tensor], list[float]]:
    torch.manual_seed(1 if blocks is None else 99)
    with use_session(StateSession(blocks)):
        model = DropoutModel()
        schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 9}}
        engine, *_ = rayzero.initialize(
            model=model,
            config=config(zero_optimization={"stage": stage}, scheduler=schedule),
        )
    losses = []
    for step in steps:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x.chunk(max(world, 1))[rank]))
        engine.step()
        losses.append(engine.metrics.loss)
    return Block.of(engine), engine.state_dict(), losses


@pytest.mark.parametrize(("stage", "world"), [(0, 0), (0, 2), (2, 2), (3, 2)])
def test_frozen_weights_buffers_schedule_and_rng_are_restored(stage, world):
    uninterrupted = run_ranks(world, train_dropout_steps, stage, range(8), None)
    first = run_ranks(world, train_dropout_steps, stage, range(4), None)
    blocks = [block for block, _, _ in first]
    second = run_ranks(world, train_dropout_steps, stage, range(4, 8), blocks)
    assert first[0][2] + second[0][2] == uninterrupted[0][2]
    assert blocks[0].index.constant_bytes > 0
    for name, value in uninterrupted[0][1].items():
        assert torch.equal(second[0][1][name], value), name


@pytest.mark.parametrize("loads", [False, True])
def test_draws_before_the_loop_count_only_after_a_load_of_ones_own(tmp_path: Path, loads: bool):
    """A script that is run again may draw on its way to the loop, as in an evaluation."""

    def initialize(blocks: list[Block] | None) -> tuple[Any, Any]:
        with use_session(StateSession(blocks)):
            data = torch.utils.data.TensorDataset(torch.ones(8, 6))
            engine, _, loader, _ = rayzero.initialize(
                model=DropoutModel(), config=config(), training_data=data
            )
        return engine, loader

    engine, loader = initialize(None)
    engine.backward(engine(*next(iter(loader))))
    engine.step()
    engine.save(str(tmp_path / "saved"))
    blocks, rng = [Block.of(engine)], torch.get_rng_state()
    again, loader = initialize(None if loads else blocks)
    if loads:
        again.load(str(tmp_path / "saved"))
    assert torch.equal(torch.get_rng_state(), rng)
    torch.rand(3)
    drawn = torch.get_rng_state()
    next(iter(loader))
    assert torch.equal(torch.get_rng_state(), drawn if loads else rng)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_scripts_own_write_of_a_frozen_weight_is_seen(stage):
    """Mirrors copy the frozen part of a block again when this number has changed."""
    model = DropoutModel()
    engine = rayzero.initialize(model=model, config=config(zero_optimization={"stage": stage}))[0]

    def step() -> int:
        engine.backward(engine(torch.ones(4, 6)))
        engine.step()
        return engine.state.constants_version

    before = step()
    assert step() == before, "training writes no frozen weight"
    with torch.no_grad():
        model.frozen.weight.mul_(2.0)
    assert engine.state.constants_version > before


def test_block_follows_buffers_without_a_state_dict_at_each_step(monkeypatch):
    model = DropoutModel()
    state = rayzero.initialize(model=model, config=config())[0].state
    blocks = [state.pack()]
    with monkeypatch.context() as patch:
        patch.delattr(nn.Module, "state_dict")
        assert state.pack() is blocks[0]
    model.norm.running_mean = torch.ones(6)
    blocks.append(state.pack())
    model.register_buffer("late", torch.ones(3))
    blocks.append(state.pack())
    model.late = torch.zeros(3)
    blocks.append(state.pack())
    del model.late
    blocks.append(state.pack())
    model.head = nn.BatchNorm1d(3, affine=False)  # such modules may come later: nothing is trained
    blocks.append(state.pack())
    model.head = nn.BatchNorm1d(3, affine=False)
    blocks.append(state.pack())
    model.head.register_buffer("running_var", torch.ones(3), persistent=False)
    blocks.append(state.pack())
    assert len({id(block) for block in blocks}) == 8
    tensors = [block.index.tensors for block in blocks]
    assert ["buffers/late" in it for it in tensors] == [0, 0, 1, 1, 0, 0, 0, 0]
    assert ["buffers/head.running_var" in it for it in tensors] == [0, 0, 0, 0, 0, 1, 1, 0]


def test_torch_scheduler_resumes():
    def make(blocks: list[Block] | None) -> Any:
        with use_session(StateSession(blocks)):
            return rayzero.initialize(
                model=nn.Linear(2, 1),
                config=config(),
                lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(
                    optimizer, 2, gamma=0.5
                ),
            )

    def step(engine: rayzero.Engine) -> None:
        engine.backward(engine(torch.ones(4, 2)).sum())
        engine.step()

    engine, optimizer, *_ = make(None)
    for _ in range(3):
        step(engine)
    resumed, resumed_optimizer, _, scheduler = make([Block.of(engine)])
    assert resumed_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.05
    step(resumed)
    assert scheduler.last_epoch == 4
    assert resumed_optimizer.param_groups[0]["lr"] == 0.025


def batch_sizes(
    rank: int, world: int, sizes: dict[str, Any], blocks: list[Block] | None
) -> tuple[Block, tuple[int, int, int]]:
    with use_session(StateSession(blocks)):
        engine, *_ = rayzero.initialize(model=nn.Linear(2, 1), config=sizes)
    batches = engine.settings.batches
    return Block.of(engine), (batches.global_batch, batches.micro_batch, batches.micro_steps)


@pytest.mark.parametrize(
    ("sizes", "first", "second", "changes"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, (12, 4, 1), (12, 4, 2), {}),
        ({"train_batch_size": 12}, (12, 4, 1), (12, 6, 1), {}),
        ({"train_batch_size": 12}, (12, 4, 1), (8, 4, 1), {"train_batch_size": 8}),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 2}, (12, 2, 2), (12, 2, 3), {}),
        (
            {
                "train_batch_size": 12,
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
            },
            (12, 2, 2),
            (12, 2, 3),
            {},
        ),
    ],
)
def test_global_batch_is_kept_at_another_world_size_unless_changed(sizes, first, second, changes):
    optimizer = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    before = run_ranks(3, batch_sizes, sizes | optimizer, None)
    assert before[0][1] == first
    blocks = [block for block, _ in before]
    after = run_ranks(2, batch_sizes, sizes | optimizer | changes, blocks)
    assert after[0][1] == second


def vote_twice(rank: int, world: int) -> list[StepRequests]:
    session = StateSession(
        requests=StepRequests(
            drain=rank == 1,
            pin=True,
            mirror_interval=1.0 + rank,
            copied=True,
            copied_bytes=3 + rank,
        )
    )
    with use_session(session):
        engine, *_ = rayzero.initialize(model=nn.Linear(2, 1), config=config())
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 2)).sum())
        engine.step()
        session.requests = StepRequests(pin=rank == 0, copied=rank == 0)
    return session.agreed


def test_ranks_agree_on_requests_in_the_vote():
    for agreed in run_ranks(2, vote_twice):
        both = {"mirror_interval": 1.5, "copied": True, "copied_bytes": 7}
        assert agreed == [StepRequests(True, pin=True, **both), StepRequests()]
