"""The sharded optimizer equals PyTorch on full parameters; parameter groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.comm.process_group import SingleRankBackend
from rayzero.engine.config import OptimizerConfig, parse_config
from rayzero.engine.errors import ConfigError
from rayzero.engine.layout.flat_layout import ParamSpec, make_layout
from rayzero.engine.offload.stores import DeviceStore
from rayzero.engine.optim.build import optimizer_factory
from rayzero.engine.optim.param_groups import find_param_groups
from rayzero.engine.optim.sharded_optimizer import (
    OptimizerShard,
    ShardedOptimizer,
    group_shards,
    optimizer_shards,
    rebind_params,
)
from rayzero.engine.precision.policy import Precision
from rayzero.engine.zero.gradients import PartialGrads
from rayzero.engine.zero.parameters import ReplicatedWeights
from rayzero.engine.zero.placement import Collective
from rayzero.engine.zero.unit import Unit

STORE = DeviceStore(Precision(), torch.device("cpu"), separate_memory=False)


def make_shards(*groups: int, dtype: torch.dtype = torch.float32) -> list[OptimizerShard]:
    torch.manual_seed(0)
    flat, grads = torch.randn(8 * len(groups), dtype=dtype), torch.randn(8 * len(groups))
    layout = make_layout("unit", [ParamSpec("one", (8 * len(groups),))], 1)
    full = slice(0, len(flat))
    params = (nn.Parameter(flat.clone()),)
    weights = ReplicatedWeights(layout, params, flat)
    unit = Unit(layout, params, weights, flat, None, full, full, None, STORE)
    shards = []
    for number, group in enumerate(groups):
        part = slice(8 * number, 8 * number + 8)
        weight, grad = nn.Parameter(flat[part].clone()), grads[part].to(dtype)
        shards.append(OptimizerShard(group, unit, part, weight, grad))
    return shards


def config(kind: Any, **params: Any) -> OptimizerConfig:
    return OptimizerConfig(type=kind, params=params)


def train_sharded(
    optimizer: OptimizerConfig, factor: float, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    shards = make_shards(0, 1, dtype=dtype)
    local = ShardedOptimizer(
        optimizer_factory(optimizer)(group_shards(shards, [{}, {"weight_decay": 0.3}])), shards
    )
    for step in range(3):
        for shard in shards:
            shard.grad.add_(0.1 * step)
        local.step(factor)
        for shard in shards:  # fused kernels overwrite gradients
            shard.grad.copy_(torch.sin(shard.weight.detach()))
    return [shard.weight.detach() for shard in shards]


def train_with_torch(make: Any, factor: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Train with plain PyTorch and scaled gradients."""
    shards = make_shards(0, 1, dtype=dtype)
    params = [nn.Parameter(shard.weight.detach().clone()) for shard in shards]
    optimizer = make([{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.3}])
    grads = [shard.grad.clone() for shard in shards]
    for step in range(3):
        for param, grad in zip(params, grads, strict=True):
            param.grad = (grad + 0.1 * step) * factor
        optimizer.step()
        grads = [torch.sin(param.detach()) for param in params]
    return [param.detach() for param in params]


def adamw(**options: Any) -> Any:
    return lambda groups: torch.optim.AdamW(groups, **({"lr": 0.1, "weight_decay": 0} | options))


def adamw_without_correction(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """AdamW after a billion steps, when bias corrections are 1."""
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0, betas=(0.5, 0.9))
    for group in optimizer.param_groups:
        for param in group["params"]:
            zeros = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": torch.tensor(1e9, dtype=torch.float64), **zeros}
    return optimizer


KINDS: list[tuple[OptimizerConfig, Any]] = [
    (config("SGD", lr=0.1, momentum=0.9), lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9)),
    (
        config("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay="1e-2"),
        lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    # DeepSpeed's Adam has no weight decay by default, unlike torch's AdamW.
    (config("AdamW", lr=0.1), adamw()),
    (
        config("AdamW", lr=0.1, betas=[0.5, 0.6], eps=1e-3, weight_decay=0.2),
        adamw(betas=(0.5, 0.6), eps=1e-3, weight_decay=0.2),
    ),
    # DeepSpeed's Adam decouples weight decay by default.
    (config("Adam", lr=0.1, weight_decay=0.2), adamw(weight_decay=0.2)),
    (config("Adam", lr=0.1, adam_w_mode=True, weight_decay=0.2), adamw(weight_decay=0.2)),
    (
        config("Adam", lr=0.1, adam_w_mode=False, weight_decay=0.2),
        lambda g: torch.optim.Adam(g, lr=0.1, weight_decay=0.2),
    ),
    (config("AdamW", lr=0.1, torch_adam=True), lambda g: torch.optim.AdamW(g, lr=0.1)),
    (config("AdamW", lr=0.1, amsgrad=True), adamw(amsgrad=True)),
    (config("AdamW", lr=0.1, fused=False, maximize=True), adamw(maximize=True)),
    (config("AdamW", lr=0.1, foreach=True), adamw(foreach=True)),
    (config("AdamW", lr=0.1, betas=[0.5, 0.9], bias_correction=False), adamw_without_correction),
    (config("Adagrad", lr=0.1), lambda g: torch.optim.Adagrad(g, lr=0.1)),
    (
        config("Adagrad", lr=0.1, lr_decay=0.2, initial_accumulator_value=0.5, eps=1e-3),
        lambda g: torch.optim.Adagrad(
            g, lr=0.1, lr_decay=0.2, initial_accumulator_value=0.5, eps=1e-3
        ),
    ),
    (config("RMSprop", lr=0.1), lambda g: torch.optim.RMSprop(g, lr=0.1)),
    (config("torch.optim.NAdam", lr="1e-1"), lambda g: torch.optim.NAdam(g, lr=0.1)),
]


@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("optimizer", "plain"), KINDS, ids=range(len(KINDS)))
def test_equals_torch_with_scaled_gradients(
    optimizer: OptimizerConfig, plain: Any, dtype: torch.dtype, factor: float
) -> None:
    tolerance = 1e-5 if dtype is torch.float32 else 1e-12
    sharded, expected = (
        train_sharded(optimizer, factor, dtype),
        train_with_torch(plain, factor, dtype),
    )
    for actual, value in zip(sharded, expected, strict=True):
        assert torch.allclose(actual, value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_fused_kernel_is_the_default(kind: Any) -> None:
    shards = make_shards(0)
    assert optimizer_factory(config(kind))(group_shards(shards, [{}])).defaults["fused"] is True
    assert (
        optimizer_factory(config(kind, fused=False))(group_shards(shards, [{}])).defaults["fused"]
        is False
    )


def test_fused_kernel_applies_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    multiply = torch._foreach_mul_
    monkeypatch.setattr(torch, "_foreach_mul_", lambda ts, f: calls.append(f) or multiply(ts, f))
    train_sharded(config("AdamW", lr=0.1), 0.5)
    assert calls == []
    train_sharded(config("AdamW", lr=0.1, fused=False), 0.5)
    train_sharded(config("AdamW", lr=0.1), 0.5, torch.float64)  # the kernel's scale is a float32
    assert calls == [0.5] * 6


def test_factor_applies_to_one_step() -> None:
    shards = make_shards(0)
    local = ShardedOptimizer(
        optimizer_factory(config("SGD", lr=1.0))(group_shards(shards, [{}])), shards
    )
    shards[0].weight.data.zero_()
    shards[0].grad.fill_(1.0)
    local.step(0.5)
    shards[0].grad.fill_(1.0)
    local.step(1.0)
    assert shards[0].weight.tolist() == pytest.approx([-1.5] * 8)


def test_lr_is_that_of_the_first_group() -> None:
    shards = make_shards(0, 1)
    optimizer = optimizer_factory(config("AdamW", lr=0.1))(group_shards(shards, [{"lr": 0.7}, {}]))
    local = ShardedOptimizer(optimizer, shards)
    assert local.lr == 0.7


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("AdamW", {"learning_rate": 1}, r"optimizer\.params\.learning_rate: unknown key"),
        ("AdamW", {"wieght_decay": 1}, r"params\.wieght_decay: .*mean 'weight_decay'"),
        ("AdamW", {"lr": None}, r"optimizer\.params\.lr: .*seen: None"),
        ("AdamW", {"lr": -1.0}, r"optimizer\.params\.lr: .*greater than or equal to 0"),
        ("AdamW", {"betas": 0.9}, r"optimizer\.params\.betas: "),
        ("AdamW", {"betas": [0.9]}, r"optimizer\.params\.betas\.1: "),
        ("AdamW", {"betas": [0.9, 1.0]}, r"optimizer\.params\.betas\.1: .*less than 1"),
        ("AdamW", {"foreach": True, "fused": True}, "params for AdamW: .*fused"),
        ("SGD", {"nesterov": True}, "params for SGD: Nesterov"),
        ("Lamb", {"amsgrad": True}, r"params\.amsgrad: refused"),
        ("Muon", {"per_head_muon": True}, r"params\.per_head_muon: refused"),
        ("Muon", {"ns_method": "svd"}, r"params\.ns_method: .*'gram' or 'standard'"),
        ("RMSprop", {"alhpa": 0.9}, "params for RMSprop: .*alhpa"),
        ("RMSprop", {"alpha": "much"}, "params for RMSprop: "),
        ("my.own.Optimizer", {}, r"optimizer\.type: 'my\.own\.Optimizer' cannot be imported"),
        ("torch.nn.Linear", {}, r"'torch\.nn\.Linear' is not a torch\.optim\.Optimizer"),
        ("torch.optim.Adafactor", {}, "does not update each element independently"),
        (
            "tests.engine.optim.test_sharded_optimizer.NormalizedSGD",
            {},
            "trains a matrix and its two halves diff",
        ),
    ],
)
def test_invalid_params_are_config_errors(kind: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        optimizer_factory(config(kind, **params))(group_shards(make_shards(0), [{}]))


class NormalizedSGD(torch.optim.SGD):
    """Not elementwise: normalizes each gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.div_(param.grad.norm())
        return super().step(closure)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lbfgs", "refused: its step needs the whole model"),
        ("Adm", r"mean 'Adam'.*Adam, AdamW, SGD"),
    ],
)
def test_invalid_names_are_config_errors(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"optimizer\.type: .*{message}"):
        parse_config({"optimizer": {"type": name}})


def test_all_invalid_params_are_reported() -> None:
    wrong = {
        "optimizer": {"type": "lamb", "params": {"max_coef": 1, "lr": "fast"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "fast"}},
    }
    with pytest.raises(ConfigError, match="3 mistakes") as raised:
        parse_config(wrong)
    assert "optimizer.params.max_coef: unknown key (did you mean 'max_coeff'?)" in str(raised.value)
    assert "scheduler.params.warmup_max_lr" in str(raised.value)


def make_unit(groups: list[int], owned: slice | None = None, frozen: bool = False) -> Unit:
    specs = [ParamSpec(f"p{i}", (40,), group) for i, group in enumerate(groups)]
    layout = make_layout("unit", specs, 2)
    flat = torch.arange(layout.numel, dtype=torch.float32)
    params = tuple(nn.Parameter(torch.zeros(40)) for _ in specs)
    weights = ReplicatedWeights(layout, params, flat)
    part = owned or slice(0, layout.numel)
    grads = PartialGrads(
        layout, -flat, part, Collective.REDUCE_SCATTER, Collectives(SingleRankBackend()), shard=part
    )
    return Unit(
        layout,
        params,
        weights,
        None if frozen else flat[part],
        None if frozen else grads,
        part,
        part,
        None,
        STORE,
    )


def test_shards_split_the_owned_range_by_group() -> None:
    full = make_unit([0, 1, 0])  # group 0 from 0 to 128, group 1 from 128
    second = make_unit([0, 1], slice(64, 128))  # all of it in group 1
    shards = optimizer_shards([full, make_unit([0], frozen=True), second])
    ranges = [(shard.group, int(shard.weight[0]), shard.weight.numel()) for shard in shards]
    assert ranges == [(0, 0, 128), (1, 128, 64), (1, 64, 64)]
    assert full.main_weights is not None
    assert shards[0].weight.data_ptr() == full.main_weights.data_ptr()  # a view, not a copy
    assert all(torch.equal(shard.grad, -shard.weight.detach()) for shard in shards)
    groups = group_shards(shards, [{"lr": 1.0}, {"lr": 2.0}])
    assert [(group["lr"], len(group["params"])) for group in groups] == [(1.0, 1), (2.0, 2)]


class TestRebindParams:
    def test_keeps_the_optimizer_and_its_options(self) -> None:
        model = nn.Linear(2, 2)
        groups = [{"params": [model.weight], "lr": 3.0}, {"params": [model.bias]}]
        given = torch.optim.SGD(groups, lr=1.0, momentum=0.5)
        shards = make_shards(1, 0, 1)
        rebound = rebind_params(given, shards)
        assert rebound is given
        assert [group["lr"] for group in given.param_groups] == [3.0, 1.0]
        assert given.param_groups[0]["params"] == [shards[1].weight]
        assert len(given.param_groups[1]["params"]) == 2

    def test_accepts_a_new_adagrad_which_has_initial_state(self) -> None:
        model = nn.Linear(2, 2)
        given = torch.optim.Adagrad(model.parameters(), lr=1.0, initial_accumulator_value=0.5)
        shards = make_shards(0)
        rebind_params(given, shards)
        assert set(given.state) == {shards[0].weight}
        assert given.state[shards[0].weight]["sum"].tolist() == [0.5] * 8
        shards[0].weight.grad = shards[0].grad
        given.step()
        with pytest.raises(
            ConfigError, match="Adagrad passed to initialize has already taken steps"
        ):
            rebind_params(given, shards)

    def test_rejects_an_optimizer_that_has_taken_steps(self) -> None:
        param = nn.Parameter(torch.zeros(1))
        given = torch.optim.SGD([param], lr=1.0, momentum=0.5)
        param.grad = torch.ones(1)
        given.step()
        with pytest.raises(ConfigError, match="SGD passed to initialize has already taken steps"):
            rebind_params(given, [])


class TestFindParamGroups:
    def test_default_is_one_group_of_trainable_parameters(self) -> None:
        model = nn.Linear(2, 2)
        model.bias.requires_grad_(False)
        groups = find_param_groups(model, None, None)
        assert groups.group_of == {model.weight: 0}
        assert groups.options == [{}]

    def test_given_groups_and_a_single_parameter(self) -> None:
        model = nn.Linear(2, 2)
        given: list[dict[str, Any]] = [
            {"params": model.bias, "lr": 1.0},
            {"params": iter([model.weight])},
        ]
        groups = find_param_groups(model, given, None)
        assert groups.group_of == {model.bias: 0, model.weight: 1}
        assert groups.options == [{"lr": 1.0}, {}]

    def test_groups_of_the_optimizer_take_precedence(self) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=1.0)
        groups = find_param_groups(model, model.parameters(), optimizer)
        assert groups.group_of == {model.weight: 0, model.bias: 1}

    def test_error_names_a_parameter_in_two_groups(self) -> None:
        model = nn.Linear(2, 2)
        given = [{"params": [model.weight]}, {"params": [model.weight]}]
        with pytest.raises(ConfigError, match="weight is in parameter groups 0 and 1"):
            find_param_groups(model, given, None)
