"""Stage-3 parameters: DeepSpeed's attributes, the idioms of TRL, PEFT and LLaVA, absent values."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import rayzero
from rayzero.engine.api.params import GatheredParameters, Init
from rayzero.engine.api.sharded_params import (
    OnDevice,
    ZeroParamStatus,
    is_zero_param,
    register_external_parameter,
)
from rayzero.engine.api.tensor_fragments import safe_get_full_fp32_param
from rayzero.engine.errors import EngineError
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


def update_gathered_weight(rank: int, world: int) -> None:
    engine = equal.start(make_model().bfloat16(), 3, samples=world, bf16={"enabled": True})
    weight: Any = engine.module[0].weight
    weight.all_gather()
    with torch.no_grad():
        weight.add_(1)
    expected = weight.detach().clone()
    weight.partition(has_been_updated=True)
    assert torch.equal(safe_get_full_fp32_param(weight), expected.float())
    engine.close()


def test_partition_updates_the_main_weights_too() -> None:
    run_ranks(2, update_gathered_weight)


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


def make_engine(stage: int) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return rayzero.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        },
    )[0]


def read_absent_values(rank: int, world: int, folder: str) -> None:
    engine = make_engine(3)
    engine.backward(engine(torch.randn(2, 8)).sum())
    engine.step()
    for state in (engine.module.state_dict(), engine.module[0].state_dict(prefix="0.")):
        value = state["0.weight"]
        assert isinstance(value, Tensor)
        assert (tuple(value.shape), value.dtype, value.numel()) == ((8, 8), torch.float32, 64)
        assert "(8, 8)" in repr(value)
        for use in (
            lambda value: value + 1,
            lambda value: value.cpu().clone(),
            lambda value: value[0, 0].item(),
            lambda value: value.tolist(),
            lambda value: value.numpy(),
            lambda value: torch.save({"w": value}, f"{folder}/{rank}.pt"),
            lambda value: save_file({"w": value}, f"{folder}/{rank}.safetensors"),
            copy.deepcopy,
            pickle.dumps,
        ):
            with pytest.raises(EngineError, match="each rank holds a part"):
                use(value)
    assert torch.isfinite(engine.module.state_dict()["1.running_mean"]).all()
    full = engine.state_dict()
    whole = {name: torch.zeros(value.shape) for name, value in engine.module.state_dict().items()}
    for part, prefix in ((engine.module, ""), (engine.module[0], "0.")):
        state = {it.removeprefix(prefix): v for it, v in whole.items() if it.startswith(prefix)}
        with pytest.raises(EngineError, match="GatheredParameters"):
            part.load_state_dict(state)
    with GatheredParameters(list(engine.module[0].parameters()), modifier_rank=0):
        engine.module[0].load_state_dict({"weight": torch.ones(8, 8), "bias": torch.ones(8)})
    full = engine.state_dict()
    assert rank or (full["0.weight"] == 1).all()
    with GatheredParameters(list(engine.module.parameters())):
        gathered = engine.module.state_dict()
        if rank == 0:
            assert all(torch.equal(gathered[name], full[name]) for name in full)


def test_are_refused(tmp_path: Path) -> None:
    run_ranks(2, read_absent_values, str(tmp_path))


def test_adapter_of_peft_is_refused_or_whole() -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    engine = rayzero.initialize(
        model=model,
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
    )[0]  # fmt: skip
    whole = peft.get_peft_model_state_dict(model, state_dict=engine.state_dict())
    adapter = peft.get_peft_model_state_dict(model)
    assert adapter.keys() == whole.keys() != set()
    for name, value in adapter.items():
        if type(value) is Tensor:
            assert torch.equal(value, whole[name])
        else:
            with pytest.raises(EngineError, match="each rank holds a part"):
                value.cpu()
