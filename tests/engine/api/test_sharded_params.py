"""DeepSpeed's attributes of stage-3 parameters, and the idioms of TRL, PEFT and LLaVA over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import rayzero
from rayzero.engine.api.params import GatheredParameters, Init
from rayzero.engine.api.sharded_params import (
    OnDevice,
    ZeroParamStatus,
    is_zero_param,
    register_external_parameter,
)
from tests.engine import equal, zoo
from tests.support.ranks import run_ranks


def make_model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2))


def maybe_zero_3(param: nn.Parameter) -> Tensor:
    """LLaVA's idiom."""
    if not hasattr(param, "ds_id"):
        return param.detach().clone()
    assert param.ds_status is ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]
    with GatheredParameters([param]):
        assert param.ds_status is ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
        return param.data.detach().cpu().clone()


def assert_whole(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, param in model.named_parameters():
        torch.testing.assert_close(maybe_zero_3(param), expected[name])


def use_attributes(rank: int, world: int) -> int:
    """Returns the number of this rank's elements."""
    plain, x = make_model(), torch.ones(1, 3)
    initial = {name: value.clone() for name, value in plain.state_dict().items()}
    with Init():
        model: Any = make_model()
    assert is_zero_param(model[0].weight)
    assert model[0].weight.ds_shape == (5, 3)
    assert model[0].weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    engine = equal.start(model, 3, samples=world)
    weight = model[0].weight
    register_external_parameter(model, weight)
    assert_whole(model, initial)
    assert len({param.ds_id for param in model.parameters()}) == len(initial)
    weight.all_gather()
    assert torch.equal(weight, initial["0.weight"])
    with torch.no_grad():
        weight.add_(1)
        plain[0].weight.add_(1)
    weight.partition(has_been_updated=True)
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    assert weight.isnan().all()
    # TRL: gather all, remove the hooks, generate, register them again.
    offload = engine.optimizer.parameter_offload
    with torch.no_grad(), GatheredParameters(list(model.parameters())):
        for _, param in [*offload.module.named_parameters(), *model.ds_external_parameters()]:
            param.ds_active_sub_modules.clear()
        for hook in offload.forward_hooks + offload.backward_hooks:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        for _ in range(rank + 1):  # ranks may differ
            assert torch.equal(model(x), plain(x))
        offload._register_deepspeed_module(offload.module)
    engine.backward(engine(x).mean())
    engine.step()
    optimizer = equal.sgd([{"params": [*plain.parameters()]}])
    plain(x).mean().backward()
    optimizer.step()
    assert_whole(model, plain.state_dict())
    assert not is_zero_param(nn.Parameter(torch.ones(1)))
    numel = sum(param.ds_tensor.numel() for param in model.parameters())
    engine.close()
    return numel


def test_attributes_and_idioms() -> None:
    numel = sum(param.numel() for param in make_model().parameters())
    assert sum(run_ranks(2, use_attributes)) == numel


def test_an_adapter_moved_to_the_models_device_keeps_its_values() -> None:
    """PEFT's idiom: made after the model, initialized, moved to where the model's weights are."""
    with Init():
        model = make_model()
    adapter = nn.Linear(3, 5, bias=False)
    nn.init.zeros_(adapter.weight)
    adapter.to(model[0].weight.device)
    model.append(adapter.to(model[0].weight.device, dtype=torch.float64))
    engine, *_ = rayzero.initialize(model=model, optimizer=zoo.sgd, config={})
    assert torch.equal(engine.module[3].weight, torch.zeros(5, 3, dtype=torch.float64))
    engine.close()


def test_on_device() -> None:
    with OnDevice(dtype=torch.bfloat16, device="meta"):
        model = nn.Linear(2, 2)
    assert (model.weight.device.type, model.weight.dtype) == ("meta", torch.bfloat16)
    assert nn.Linear(1, 1).weight.dtype is torch.float32
