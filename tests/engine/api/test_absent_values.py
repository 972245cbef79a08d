"""`model.state_dict()` at stage 3: what reads the values of a weight that is not there."""

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
from rayzero.engine.api.params import GatheredParameters
from rayzero.engine.errors import EngineError
from tests.support.ranks import run_ranks


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
