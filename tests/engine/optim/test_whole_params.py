"""Optimizers that need full parameters, which are assembled from shards; Muon's iterations."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import rayzero
from rayzero.engine.errors import ConfigError
from rayzero.engine.optim.muon import (
    NEWTON_SCHULZ_METHODS,
    NORM_EPS,
    Muon,
    newton_schulz_gram,
    newton_schulz_standard,
)
from rayzero.engine.optim.optimizers import Lamb, Lion
from rayzero.engine.optim.whole_params import WholeParam, choose_owners
from tests.engine import zoo
from tests.engine.optim import references
from tests.support.ranks import run_ranks


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), max_size=30), st.integers(1, 9))
def test_work_is_balanced_over_owners(shapes: list[tuple[int, int]], world: int) -> None:
    params = [WholeParam(number, shape, 0) for number, shape in enumerate(shapes)]
    owners = choose_owners(params, world)
    assert owners.keys() == set(range(len(shapes)))
    cost = [rows * columns * min(rows, columns) for rows, columns in shapes]
    loads = [sum(cost[n] for n, owner in owners.items() if owner == r) for r in range(world)]
    # Greedy, largest first: at most the mean load plus a parameter.
    assert max(loads) <= sum(cost) / world + max(cost, default=0)


def traffic(rank: int, world: int, optimizer: dict[str, Any], stage: int) -> dict[str, int]:
    model = zoo.make_model()
    engine, *_ = rayzero.initialize(
        model=model,
        config={
            "gradient_clipping": 0,
            "train_batch_size": 4,
            "optimizer": optimizer,
            "zero_optimization": {"stage": stage},
        },
    )
    zoo.train(engine, zoo.batches(2, 4))
    result = engine._runtime.collectives.counters.by_name
    return {name: result[name].calls for name in ("sums", "exchange") if name in result}


@pytest.mark.parametrize(
    ("kind", "stage", "calls"),
    [
        ("AdamW", 2, {}),
        ("Lion", 2, {}),
        ("Lamb", 2, {"sums": 2}),
        ("Muon", 3, {"exchange": 4}),
        ("Lamb", 0, {}),
        ("Muon", 0, {}),
    ],
)
def test_only_optimizers_of_whole_params_communicate(
    kind: str, stage: int, calls: dict[str, int]
) -> None:
    assert run_ranks(2, traffic, {"type": kind}, stage) == [calls] * 2


class TestClasses:
    """Instances and functions given to initialize."""

    @pytest.mark.parametrize(
        ("make", "expected"),
        [
            (lambda g: Lamb(g, lr=0.05), lambda g: references.Lamb(g, lr=0.05)),
            (lambda g: Lion(g, lr=0.01), lambda g: references.Lion(g, lr=0.01)),
        ],
    )
    @pytest.mark.parametrize("instance", [True, False])
    def test_equal_the_reference(self, make: Any, expected: Any, instance: bool) -> None:
        model = zoo.make_model(torch.float64)
        groups = zoo.two_groups(model)
        data = list(zoo.batches(4, 4))
        engine, *_ = rayzero.initialize(
            model=model,
            model_parameters=None if instance else groups,
            optimizer=make(groups) if instance else make,
            config={"train_batch_size": 4, "gradient_clipping": 0},
        )
        zoo.train(engine, data)
        _, state = zoo.train_reference(zoo.make_model(torch.float64), expected, data)
        for name, value in engine.state_dict().items():
            assert zoo.relative_error(value, state[name]) < 1e-9, name

    @pytest.mark.parametrize("corrected", [True, False])
    @pytest.mark.parametrize("inside", [True, False])
    def test_lamb_without_an_engine(self, corrected: bool, inside: bool) -> None:
        options = {"lr": 0.1, "weight_decay": 0.1, "bias_correction": corrected}
        options |= {"eps_inside_sqrt": inside, "eps": 0.01, "max_coeff": 3.0}
        data = list(zoo.batches(3, 4))
        (_, own), (_, expected) = (
            zoo.train_reference(zoo.make_model(torch.float64), partial(cls, **options), data)
            for cls in (Lamb, references.Lamb)
        )
        for name, value in own.items():
            assert zoo.relative_error(value, expected[name]) < 1e-9, name

    def test_muon_on_shards_needs_use_muon(self) -> None:
        model = zoo.make_model()
        matrices = [p for p in model.parameters() if p.ndim == 2 and p.requires_grad]
        with pytest.raises(ConfigError, match="group 0 does not set use_muon"):
            rayzero.initialize(model=model, model_parameters=matrices, optimizer=Muon, config={})


class TestMuonGroups:
    """Which parameters use Muon, with which options."""

    def groups(self, model: nn.Module, **params: Any) -> list[dict[str, Any]]:
        engine, *_ = rayzero.initialize(
            model=model,
            model_parameters=zoo.two_groups(model),
            config={"optimizer": {"type": "Muon", "params": params}},
        )
        keys = ("use_muon", "lr", "weight_decay", "momentum", "betas")
        return [{key: group.get(key) for key in keys} for group in engine.optimizer.param_groups]

    def test_matrices_except_embeddings_use_muon(self) -> None:
        model = zoo.make_model()
        assert self.groups(model, muon_lr=0.3, lr=0.2, momentum=0.9) == [
            {"use_muon": True, "lr": 0.3, "weight_decay": 0.1, "momentum": 0.9, "betas": None},
            {
                "use_muon": False,  # the embedding, tied to the head
                "lr": 0.2,
                "weight_decay": 0.1,
                "momentum": None,
                "betas": (0.9, 0.95),
            },
            {  # the lr of the group takes precedence
                "use_muon": False,
                "lr": 3e-3,
                "weight_decay": 0.0,
                "momentum": None,
                "betas": (0.9, 0.95),
            },
        ]

    def test_use_muon_of_a_parameter_takes_precedence(self) -> None:
        model = zoo.make_model()
        for param in model.parameters():
            param.use_muon = False  # type: ignore[attr-defined]
        assert [group["use_muon"] for group in self.groups(model)] == [False, False]

    def test_vectors_cannot_use_muon(self) -> None:
        model = zoo.make_model()
        model.blocks[0].norm.weight.use_muon = True  # type: ignore[index,union-attr]
        with pytest.raises(ConfigError, match=r"norm\.weight of shape \(10,\) has use_muon"):
            self.groups(model)


def test_nvme_offload_is_rejected(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="the state of Lamb cannot be offloaded to NVMe"):
        rayzero.initialize(
            model=zoo.make_model(),
            config={
                "optimizer": {"type": "Lamb"},
                "zero_optimization": {
                    "stage": 1,
                    "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
                },
            },
        )


class FilterModel(nn.Module):
    """Parameters of three and four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 6, 3)
        self.experts = nn.Parameter(torch.randn(3, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv(x).mean((-2, -1)) @ self.experts).square().mean()


def filter_batches(steps: int) -> list[Tensor]:
    seeds = [torch.Generator().manual_seed(step) for step in range(steps)]
    return [torch.randn(2, 2, 5, 5, generator=seed).double() for seed in seeds]


def train_filters(
    rank: int, world: int, stage: int, steps: int, make_optimizer: Any = None
) -> tuple[dict[str, Tensor], float]:
    """With Muon, or the user's optimizer and schedule. Returns the last learning rate, too."""
    model = FilterModel().double()
    optimizer, schedule = make_optimizer(model) if make_optimizer else (None, None)
    engine, *_ = rayzero.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config={
            "train_batch_size": 2,
            "gradient_clipping": 0,
            "optimizer": {"type": "Muon", "params": {"lr": 0.1, "weight_decay": 0.1}},
            "zero_optimization": {"stage": stage},
        },
    )
    for x in filter_batches(steps):
        engine.backward(engine(x.chunk(max(world, 1))[rank]))
        engine.step()
    return engine.state_dict(), schedule.get_last_lr()[0] if schedule else 0.0


def test_filters_and_stacks_of_matrices() -> None:
    """A filter is a matrix, a stack is orthogonalized per matrix; the same on shards."""
    unsharded, _ = run_ranks(0, train_filters, 0, 2)[0]
    sharded, _ = run_ranks(2, train_filters, 2, 2)[0]
    for name, value in unsharded.items():
        assert zoo.relative_error(sharded[name], value) < 1e-9, name
    model = FilterModel().double()
    change = (unsharded["experts"] - model.experts.detach() * 0.99**2).norm()
    assert 0 < change < 0.1 * 2 * 1.3 * (3 * 6) ** 0.5


def adafactor(model: nn.Module) -> tuple[Any, Any]:
    from transformers import Adafactor  # which takes seconds to import

    optimizer = Adafactor(model.parameters(), lr=0.1, relative_step=False, scale_parameter=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return optimizer, schedule


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler")
def test_adafactor_of_the_user_with_filters_and_stacks_of_matrices() -> None:
    model = FilterModel().double()
    optimizer, schedule = adafactor(model)
    for x in filter_batches(3):
        optimizer.zero_grad()
        torch.stack([model(part) for part in x.chunk(2)]).mean().backward()
        optimizer.step()
        schedule.step()
    for stage in (0, 3):
        state, last_lr = run_ranks(2, train_filters, stage, 3, adafactor, timeout_s=300)[0]
        assert last_lr == schedule.get_last_lr()[0]
        for name, value in model.state_dict().items():
            assert zoo.relative_error(state[name], value) < 1e-9, name


SHAPES = [(7, 10), (10, 7), (8, 8), (1, 5), (64, 16)]


def random_matrix(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_standard_equals_torch(shape: tuple[int, int]) -> None:
    matrix = random_matrix(*shape, dtype=torch.float32)
    param = nn.Parameter(torch.zeros(shape))
    muon = torch.optim.Muon([param], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0)
    param.grad = matrix.clone()
    muon.step()
    scale = max(1, shape[0] / shape[1]) ** 0.5
    # Both round to bfloat16 at the same operations; only the scale is rounded differently.
    assert torch.allclose(
        param.detach(), newton_schulz_standard(matrix, 5).float() * -scale, rtol=1e-6
    )


@pytest.mark.parametrize("shape", [*SHAPES, (3, 6, 9)])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 6])
def test_gram_method_equals_the_polynomial(shape: tuple[int, ...], steps: int) -> None:
    """In float64, an iteration maps every singular value x to a x + b x^3 + c x^5."""
    matrix = random_matrix(*shape)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / matrix.norm(dim=(-2, -1)).unsqueeze(-1)
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = left @ torch.diag_embed(values) @ right
    assert torch.allclose(newton_schulz_gram(matrix, steps), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", NEWTON_SCHULZ_METHODS)
def test_singular_values_are_near_one(method: str) -> None:
    result = NEWTON_SCHULZ_METHODS[method](random_matrix(12, 20, dtype=torch.float32), 5).double()
    values = torch.linalg.svdvals(result)
    assert 0.6 < values.min() < values.max() < 1.3


@pytest.mark.parametrize("method", NEWTON_SCHULZ_METHODS)
def test_zero_matrix_stays_zero(method: str) -> None:
    assert NORM_EPS > 0
    assert NEWTON_SCHULZ_METHODS[method](torch.zeros(4, 6), 5).count_nonzero() == 0
