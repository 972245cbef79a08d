"""The sharded optimizer equals PyTorch on full parameters; parameter groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayzero.engine.config import OptimizerConfig, parse_config
from rayzero.engine.errors import ConfigError
from rayzero.engine.layout.flat_layout import ParamSpec, make_layout
from rayzero.engine.offload.stores import StateStore
from rayzero.engine.optim.build import optimizer_factory
from rayzero.engine.optim.param_groups import find_param_groups
from rayzero.engine.optim.sharded_optimizer import (
    OptimizerShard,
    ShardedOptimizer,
    group_shards,
    rebind_params,
)
from rayzero.engine.precision.policy import Precision
from rayzero.engine.zero.parameters import ReplicatedWeights
from rayzero.engine.zero.unit import Unit

STORE = StateStore(Precision(), torch.device("cpu"), separate_memory=False)


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


FACTORS = (0.3, 1.0, 0.5)
"""Of the gradients, by step."""


def train_sharded(optimizer: OptimizerConfig, dtype: torch.dtype) -> list[Tensor]:
    shards = make_shards(0, 1, dtype=dtype)
    local = ShardedOptimizer(
        optimizer_factory(optimizer)(group_shards(shards, [{}, {"weight_decay": 0.3}])), shards
    )
    for factor in FACTORS:
        local.step(factor)
        for shard in shards:  # fused kernels overwrite gradients
            shard.grad.copy_(torch.sin(shard.weight.detach()))
    return [shard.weight.detach() for shard in shards]


def train_with_torch(make: Any, dtype: torch.dtype) -> list[Tensor]:
    """Train with plain PyTorch and scaled gradients."""
    shards = make_shards(0, 1, dtype=dtype)
    params = [nn.Parameter(shard.weight.detach().clone()) for shard in shards]
    optimizer = make([{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.3}])
    grads = [shard.grad.clone() for shard in shards]
    for factor in FACTORS:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad * factor
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("optimizer", "plain"), KINDS, ids=range(len(KINDS)))
def test_equals_torch_with_scaled_gradients(
    optimizer: OptimizerConfig, plain: Any, dtype: torch.dtype
) -> None:
    tolerance = 1e-5 if dtype is torch.float32 else 1e-12
    pairs = zip(train_sharded(optimizer, dtype), train_with_torch(plain, dtype), strict=True)
    for actual, value in pairs:
        assert torch.allclose(actual, value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_fused_kernel_is_the_default(kind: Any) -> None:
    groups = group_shards(make_shards(0), [{}])
    assert optimizer_factory(config(kind))(groups).defaults["fused"] is True
    assert optimizer_factory(config(kind, fused=False))(groups).defaults["fused"] is False


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


def test_accepts_a_new_adagrad_which_has_initial_state() -> None:
    model = nn.Linear(2, 2)
    given = torch.optim.Adagrad(model.parameters(), lr=1.0, initial_accumulator_value=0.5)
    shards = make_shards(0)
    rebind_params(given, shards)
    assert set(given.state) == {shards[0].weight}
    assert given.state[shards[0].weight]["sum"].tolist() == [0.5] * 8
    shards[0].weight.grad = shards[0].grad
    given.step()
    with pytest.raises(ConfigError, match="Adagrad passed to initialize has already taken steps"):
        rebind_params(given, shards)


def test_groups_are_the_optimizers_else_those_given_else_one() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=1.0)
    groups = find_param_groups(model, model.parameters(), optimizer)
    assert groups.group_of == {model.weight: 0, model.bias: 1}
    given: list[dict[str, Any]] = [
        {"params": model.bias, "lr": 1.0},
        {"params": iter([model.weight])},
    ]
    groups = find_param_groups(model, given, None)
    assert groups.group_of == {model.bias: 0, model.weight: 1}
    assert groups.options == [{"lr": 1.0}, {}]
    model.bias.requires_grad_(False)
    assert find_param_groups(model, None, None).group_of == {model.weight: 0}
    twice = [{"params": [model.weight]}, {"params": [model.weight]}]
    with pytest.raises(ConfigError, match="weight is in parameter groups 0 and 1"):
        find_param_groups(model, twice, None)
