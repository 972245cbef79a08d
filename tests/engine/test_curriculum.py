"""What forward gets by the step: schedules, cut sequences, dropped layers and tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero.deepspeed.engine import convert_to_random_ltd
from rayzero.engine.config import parse_config
from rayzero.engine.curriculum import TokenDropLayer, difficulty, kept_tokens
from rayzero.engine.errors import ConfigError
from rayzero.engine.session import use_session
from tests.engine.state.blocks import Block, StateSession
from tests.support.ranks import run_ranks

LENGTH, WIDTH = 12, 4


def curriculum(kind: str, low: int = 2, high: int = 12, **schedule: Any) -> dict[str, Any]:
    return {
        "curriculum_learning": {
            "enabled": True,
            "curriculum_type": "seqlen",
            "min_difficulty": low,
            "max_difficulty": high,
            "schedule_type": kind,
            "schedule_config": schedule,
        }
    }


LTD = {
    "data_efficiency": {
        "enabled": True,
        "data_routing": {
            "enabled": True,
            "random_ltd": {
                "enabled": True,
                "random_ltd_layer_num": 1,
                "random_ltd_layer_id": [1],
                "model_mask_name": "mask",
                "random_ltd_schedule": {
                    "min_value": 4,
                    "max_value": 12,
                    "schedule_config": {"require_steps": 4, "seq_per_step": 2},
                },
            },
        },
    }
}

# (config, difficulties of steps 1 to 6, as DeepSpeed 0.19.8's CurriculumScheduler has them)
SCHEDULES = [
    (curriculum("fixed_linear", total_curriculum_step=5, difficulty_step=2), [4, 6, 8, 10, 12, 12]),
    (
        curriculum("fixed_linear", 3, total_curriculum_step=6, difficulty_step=4),
        [4, 4, 4, 8, 8, 12],
    ),
    (
        curriculum("fixed_root", total_curriculum_step=4, difficulty_step=1, root_degree=2),
        [7, 9, 10, 12, 12, 12],
    ),
    (
        curriculum("fixed_discrete", 2, 9, difficulty=[2, 5, 9], max_step=[1, 4]),
        [2, 5, 5, 5, 9, 9],
    ),
]


@pytest.mark.parametrize(("document", "expected"), SCHEDULES)
def test_difficulties_are_deepspeeds(document: dict[str, Any], expected: list[int]) -> None:
    section = parse_config(document).curriculum_learning
    assert [difficulty(section, step) for step in range(1, 7)] == expected


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []  # input, mask, output

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is not None
        out: Tensor = hidden_states + self.linear(hidden_states)
        self.seen.append((hidden_states.detach().clone(), mask, out.detach().clone()))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.lengths: list[int] = []

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        assert tokens.shape == labels.shape
        self.lengths.append(tokens.shape[1])
        hidden = tokens.unsqueeze(-1) * torch.linspace(0.1, 1, WIDTH)
        mask = torch.ones(len(tokens), 1, tokens.shape[1], tokens.shape[1]).tril()
        for layer in self.layers:
            hidden = layer(hidden, mask=mask)
        return (hidden.sum(-1) - labels).square().mean()


class Told(nn.Linear):
    """Records the keyword arguments of forward."""

    def forward(self, value: Tensor, curriculum_seqlen: int = 0, **more: Any) -> Tensor:
        self.__dict__.setdefault("told", []).append({"length": curriculum_seqlen} | more)
        return super().forward(value).square().mean()


def make_engine(model: nn.Module, blocks: list[Block] | None = None, **more: Any) -> Any:
    document = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
    with use_session(StateSession(blocks)):
        return rayzero.initialize(model=model, config=document | more)[0]


def take_step(engine: Any, seed: int) -> None:
    torch.manual_seed(seed)
    part = torch.rand(2, LENGTH).chunk(engine.world_size)[engine.rank]
    engine.backward(engine(part, labels=part))
    engine.step()


def test_sequences_are_cut_and_a_resumed_run_goes_on() -> None:
    engine = make_engine(Net(), **SCHEDULES[0][0])
    for step in range(3):
        take_step(engine, step)
    assert engine.module.lengths == [4, 6, 8]
    engine.eval()
    engine(*torch.rand(2, 2, LENGTH))
    assert engine.module.lengths[-1] == LENGTH
    resumed = make_engine(Net(), [Block.of(engine)], **SCHEDULES[0][0])
    take_step(resumed, 3)
    assert resumed.module.lengths == [10]


def test_forward_may_take_the_length_and_the_probability() -> None:
    drop = {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.1}}
    model = Told(3, 1)
    engine = make_engine(model, **drop, **curriculum("custom"))
    with pytest.raises(ConfigError, match="set_custom_curriculum_learning_schedule"):
        engine(torch.rand(2, 3))
    engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 10 * step})
    for _ in range(2):
        engine.backward(engine(torch.rand(2, 3)))
        engine.step()
    thetas = [0.5 * math.exp(-0.1 * step) + 0.5 for step in range(2)]
    assert model.told == [
        {"length": 10 * (step + 1), "progressive_layer_drop": True, "pld_theta": theta}
        for step, theta in enumerate(thetas)
    ]
    assert engine.get_pld_theta() == pytest.approx(0.5 * math.exp(-0.2) + 0.5)


def drop_tokens_on_ranks(rank: int, world: int, stage: int) -> None:
    torch.manual_seed(0)
    model = Net()
    engine = convert_to_random_ltd(
        make_engine(model, zero_optimization={"stage": stage}, **LTD), Layer
    )
    for step in range(5):
        take_step(engine, step)
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in Net().named_parameters()]  # checkpoints stay valid
    first, middle, last = (layer.seen for layer in model.layers)
    assert [hidden.shape[1] for hidden, *_ in middle] == [4, 6, 8, 10, 12]
    assert {hidden.shape[1] for hidden, *_ in first + last} == {LENGTH}
    for step, (hidden, mask, _) in enumerate(middle[:4]):
        count, before, after = hidden.shape[1], first[step][2], last[step][0]
        assert mask.shape[-2:] == (count, count)
        for sample in range(len(before)):
            kept = {tuple(row) for row in hidden[sample].tolist()}
            dropped = [tuple(row) not in kept for row in before[sample].tolist()]
            assert dropped.count(False) == count
            assert torch.equal(after[sample][dropped], before[sample][dropped])
            changed = (after[sample] != before[sample]).any(-1)
            assert changed.tolist() == [not it for it in dropped]


@pytest.mark.parametrize(("world", "stage"), [(0, 0), (2, 3)])
def test_random_ltd_drops_tokens_in_its_layers(world: int, stage: int) -> None:
    run_ranks(world, drop_tokens_on_ranks, stage)


def test_a_layer_that_is_the_identity_changes_nothing() -> None:
    """Tokens return to their places."""
    section = parse_config(LTD).data_efficiency.token_drop
    assert section is not None
    assert [kept_tokens(section, step) for step in range(6)] == [4, 6, 8, 10, 12, 12]
    for order in ("batch_seq_dim", "seq_batch_dim"):
        for kind in ("encoder", "decoder"):
            layer = nn.Identity()
            layer.forward = lambda value, mask: value  # type: ignore[method-assign]
            config = section.model_copy(update={"hidden_state_order": order, "model_type": kind})
            TokenDropLayer(layer, config, lambda: 4)
            hidden = torch.rand(2, 6, 3) if order == "batch_seq_dim" else torch.rand(6, 2, 3)
            out = layer(hidden, mask=torch.ones(2, 1, 6, 6))
            assert torch.equal(out, hidden)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (curriculum("fixed_linear"), "total_curriculum_step: this key is required"),
        (curriculum("fixed_discrete", difficulty=[1], max_step=[2]), "one value more"),
        ({"curriculum_learning": {"enabled": True}}, "min_difficulty: this key is required"),
        (
            {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True}}},
            "data_sampling: refused",
        ),
    ],
)
def test_incomplete_sections_are_errors(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(document)


def test_what_lacks_its_forward_or_section_is_refused() -> None:
    engine = make_engine(nn.Linear(3, 1), progressive_layer_drop={"enabled": True})
    with pytest.raises(ConfigError, match=r"forward takes no progressive_layer_drop and no p"):
        engine(torch.rand(2, 3))
    with pytest.raises(ConfigError, match="random_ltd"):
        convert_to_random_ltd(make_engine(Net()), Layer)
