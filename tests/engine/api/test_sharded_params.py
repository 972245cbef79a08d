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
from tests.engine import zoo
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


def use_attributes(rank: int, world: int) -> dict[str, Any]:
    with Init():
        model: Any = make_model()
    before = is_zero_param(model[0].weight), model[0].weight.ds_shape, model[0].weight.ds_status
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
    }
    engine, optimizer, *_ = rayzero.initialize(model=model, config=config)
    weight = model[0].weight
    register_external_parameter(model, weight)
    whole = {name: maybe_zero_3(param) for name, param in model.named_parameters()}
    ids = [param.ds_id for param in model.parameters()]
    local = sum(param.ds_tensor.numel() for param in model.parameters())
    weight.all_gather()
    gathered = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1)
    weight.partition(has_been_updated=True)
    parted = weight.ds_status, bool(weight.isnan().all())
    # TRL: gather all, remove the hooks, generate, register them again.
    offload = optimizer.parameter_offload  # type: ignore[union-attr]
    with torch.no_grad(), GatheredParameters(list(model.parameters())):
        for _, param in [*offload.module.named_parameters(), *model.ds_external_parameters()]:
            param.ds_active_sub_modules.clear()
        for hook in offload.forward_hooks + offload.backward_hooks:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        generated = [model(torch.ones(1, 3)) for _ in range(rank + 1)]  # ranks may differ
        offload._register_deepspeed_module(offload.module)
    engine.backward(engine(torch.ones(1, 3)).mean())
    engine.step()
    after = {name: maybe_zero_3(param) for name, param in model.named_parameters()}
    ordinary = is_zero_param(nn.Parameter(torch.ones(1)))
    engine.close()
    return {
        "before": before,
        "whole": whole,
        "ids": ids,
        "local": local,
        "gathered": gathered,
        "parted": parted,
        "generated": generated,
        "after": after,
        "ordinary": ordinary,
    }


def test_attributes_and_idioms() -> None:
    results = run_ranks(2, use_attributes)
    model = make_model()
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.add_(1)
    generated = model(torch.ones(1, 3))
    generated.mean().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    for result in results:
        assert result["before"] == (True, torch.Size([5, 3]), ZeroParamStatus.NOT_AVAILABLE)
        assert all(torch.equal(result["whole"][name], value) for name, value in initial.items())
        assert len(set(result["ids"])) == len(initial)
        assert torch.equal(result["gathered"], initial["0.weight"])
        assert result["parted"] == (ZeroParamStatus.NOT_AVAILABLE, True)
        assert torch.equal(result["generated"][0], generated)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(result["after"][name], value)
        assert not result["ordinary"]
    total = sum(value.numel() for value in initial.values())
    assert sum(result["local"] for result in results) == total


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
