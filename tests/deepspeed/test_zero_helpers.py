"""TiledLinear, unwrap_model_for_generation, local state: against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero.deepspeed import zero
from rayzero.deepspeed.ops import DeepSpeedCPUAdam
from rayzero.deepspeed.utils import (
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from rayzero.engine.errors import ConfigError
from tests.support.ranks import run_ranks


class Doubled(nn.Linear):
    """Returns its bias, as Megatron's layers do."""

    def forward(self, input: Tensor) -> Any:  # noqa: A002 -- as the base class
        return nn.functional.linear(input, self.weight), self.bias


@pytest.mark.parametrize("splits", [(1, 1), (3, 2), (2, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_tiled_linear_equals_linear(splits: tuple[int, int], bias: bool) -> None:
    linear = nn.Linear(7, 5, bias=bias, dtype=torch.float64)
    columns, rows = splits
    options = {"in_splits": columns, "out_splits": rows, "dtype": torch.float64}
    tiled = zero.TiledLinear(7, 5, bias=bias, init_linear=linear, **options)
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    torch.testing.assert_close(tiled(x), linear(x))
    apart = zero.TiledLinear(
        7, 5, bias, columns, rows, True, False, init_linear=linear, dtype=torch.float64
    )
    parts = apart(torch.tensor_split(x, apart.in_parts[1:-1], -1))
    assert len(parts) == rows
    torch.testing.assert_close(torch.cat(parts, -1), linear(x))
    own = zero.TiledLinearReturnBias(7, 5, bias, linear_cls=Doubled, init_linear=linear, **options)
    output, returned = own(x)
    torch.testing.assert_close(output + (0 if returned is None else returned), linear(x))
    assert (returned is None) == (not bias)


@pytest.mark.parametrize("splits", [{"in_splits": 8}, {"out_splits": 0}])
def test_tiled_linear_of_too_many_tiles_is_an_error(splits: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"allowed: .*_splits from 1 to"):
        zero.TiledLinear(7, 5, **splits)


def make_model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def make_engine(stage: int, model: nn.Module, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, **more},
        "rayzero": {"unshard_modules": ["Linear"]},
    }
    return rayzero.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train_tiled(rank: int, world: int) -> dict[str, Any]:
    model = make_model()
    with zero.Init():
        tiled = zero.TiledLinear(6, 5, in_splits=2, out_splits=3).double()
    tiled.copy_params_from(model[0])
    model[0] = tiled
    engine = make_engine(3, model)
    for x in batches(rank):
        engine.backward(engine(x).square().mean())
        engine.step()
    whole = zero.TiledLinear(6, 5, in_splits=2, out_splits=3).double()
    state = engine.state_dict()
    engine.close()
    if not state:
        return {}
    whole.load_state_dict({name[2:]: value for name, value in state.items() if name[0] == "0"})
    return {
        "output": whole(torch.ones(1, 6, dtype=torch.float64)).detach(),
        "head": state["2.weight"],
    }


def batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(2, 2, 6, generator=generator, dtype=torch.float64)[rank] for _ in range(3)]


def plain(steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0)  # DeepSpeed's default
    for both in list(zip(batches(0), batches(1), strict=True))[:steps]:
        optimizer.zero_grad()
        model(torch.cat(both)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_tiled_linear_at_stage_3_trains_as_linear() -> None:
    trained = run_ranks(2, train_tiled)[0]
    model, _ = plain()
    x = torch.ones(1, 6, dtype=torch.float64)
    torch.testing.assert_close(trained["output"], model[0](x).detach())  # type: ignore[index]
    torch.testing.assert_close(trained["head"], model[2].weight.detach())  # type: ignore[index]


def generate(rank: int, world: int, stage: int) -> list[Tensor]:
    engine = make_engine(stage, make_model())
    with torch.no_grad(), zero.unwrap_model_for_generation(engine) as model:
        outputs = [model(torch.ones(1, 6).double()) for _ in range(rank + 1)]  # ranks may differ
    engine.backward(engine(batches(rank)[0]).square().mean())
    engine.step()
    outputs += engine.state_dict().values()
    engine.close()
    return outputs


@pytest.mark.parametrize("stage", [1, 3])
def test_unwrap_model_for_generation(stage: int) -> None:
    first, second = run_ranks(2, generate, stage)
    expected = make_model()(torch.ones(1, 6, dtype=torch.float64)).detach()
    torch.testing.assert_close([*second, first[0]], [expected] * 3)
    torch.testing.assert_close(first[1:], list(plain(1)[0].state_dict().values()))


def change_local_state(rank: int, world: int, offload: str, folder: str) -> dict[str, Tensor]:
    """Halves moments and gradients, and adds one to weights, part by part."""
    device = {"device": offload} | ({"nvme_path": folder} if offload == "nvme" else {})
    engine = make_engine(3, make_model(), offload_optimizer=device)
    first, second, _ = batches(rank)
    engine.backward(engine(first).square().mean())
    engine.step()
    for param in engine.module.parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            state = safe_get_local_optimizer_state(param, key)
            if state is not None:
                safe_set_local_optimizer_state(param, state.clone() / 2, key)
    engine.backward(engine(second).square().mean())
    for param in engine.module.parameters():
        grad = safe_get_local_grad(param)
        if grad is not None:
            safe_set_local_grad(param, grad / 2)
        weights = safe_get_local_fp32_param(param)
        if weights is not None:
            safe_set_local_fp32_param(param, weights.clone() + 1)
    engine.step()
    params = enumerate(engine.module.parameters())
    moments = {str(at): safe_get_full_optimizer_state(param, "exp_avg") for at, param in params}
    state = engine.state_dict() | moments
    engine.close()
    return state if rank == 0 else {}


@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
def test_local_state_of_offloaded_optimizers(offload: str, tmp_path: Any) -> None:
    state = run_ranks(2, change_local_state, offload, str(tmp_path))[0]
    model, optimizer = plain(1)
    values = optimizer.state.values()
    optimizer.zero_grad()
    with torch.no_grad():
        for moment in values:
            moment["exp_avg"] /= 2
            moment["exp_avg_sq"] /= 2
    model(torch.cat([batches(rank)[1] for rank in range(2)])).square().mean().backward()
    with torch.no_grad():
        for param in model.parameters():
            param.grad /= 2  # type: ignore[operator]
            param += 1
    optimizer.step()
    expected = model.state_dict() | {str(i): it["exp_avg"] for i, it in enumerate(values)}
    torch.testing.assert_close(state, expected)


def test_cpu_adam_updates_as_adamw() -> None:
    ours, theirs = make_model(), make_model()
    optimizer = DeepSpeedCPUAdam(
        ours.parameters(), 0.1, weight_decay=0.01, fp32_optimizer_states=False
    )
    other = torch.optim.AdamW(theirs.parameters(), 0.1)
    for model, one in ((ours, optimizer), (theirs, other)):
        model(batches(0)[0]).square().mean().backward()
        one.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    with pytest.raises(ConfigError, match=r"engine.step\(\), which updates all parameters"):
        optimizer.rollback_subgroup(0)
