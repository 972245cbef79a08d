"""PEFT's LoRA: what the repair of a killed worker moves; adapters that are exported and merged."""

from __future__ import annotations

import copy
import importlib.util
from contextlib import closing
from pathlib import Path

import pytest
import torch
from rayzero.deepspeed.zero import GatheredParameters
from safetensors.torch import load_file
from torch import Tensor, nn

import rayzero
from tests.support.ranks import run_ranks
from tests.workers.local_workers import LocalWorkers, read_loads
from tests.workers.recovery_jobs import engine_config
from tests.workers.support import mirrored_setup

STEPS, KILL_STEP, RANKS = 8, 5, 3
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("peft") is None, reason="peft is missing: rayzero[hf]"
    ),
]


def test_repair_moves_no_frozen_weights_that_a_rank_keeps(tmp_path: Path) -> None:
    from tests.huggingface import lora_jobs

    frozen = sum(
        param.numel() * param.itemsize
        for param in lora_jobs.make_model().parameters()
        if not param.requires_grad
    )
    faults = (  # the pause lets mirrors beside training end
        f'slow(rank=1, step={KILL_STEP}, seconds=0.3, phase="backward")',
        f'kill(rank=1, step={KILL_STEP}, phase="reduce")',
    )
    options = {"steps": STEPS, "ledger": False, "engine_config": engine_config(3)}
    function = "tests.huggingface.lora_jobs:train"
    spec = mirrored_setup(tmp_path, function, faults=faults, **options)
    with closing(LocalWorkers(spec, RANKS + 1)) as local:
        local.form(1, [0, 1, 2])
        assert local.wait_lost() == 1
        assert local.fired_steps() == [KILL_STEP] * 2
        local.fence(1, [0, 2])
        local.finish(2, [0, RANKS, 2], local.slots(1, RANKS))
    for survivor in (0, 2):
        _, moved, copied, read = read_loads(str(tmp_path), survivor)[-1]
        assert moved > 0
        assert copied > frozen / RANKS, "its shards, on the device"
        assert read == 0
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    for name, expected in lora_jobs.oracle(STEPS, local.setup.seed).items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-9, atol=1e-12)


def export_and_merge(rank: int, world: int, stage: int, folder: str) -> None:
    from tests.huggingface.lora_jobs import make_model

    plain = make_model()
    tokens = torch.arange(8)[None]
    engine = make_engine(make_model(), stage)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    plain(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.SGD([it for it in plain.parameters() if it.requires_grad], 0.1).step()
    state = engine.module_state_dict()
    if rank == 0:
        engine.module.save_pretrained(f"{folder}/adapter", state_dict=state)
        plain.save_pretrained(f"{folder}/plain")
        name = "adapter_model.safetensors"
        check_equal(load_file(f"{folder}/adapter/{name}"), load_file(f"{folder}/plain/{name}"))
    with GatheredParameters(list(engine.module.parameters())):
        engine.module.merge_adapter()
        merged = {name: value.clone() for name, value in engine.module.named_parameters()}
        engine.module.unmerge_adapter()
        whole = copy.deepcopy(engine.module).merge_and_unload()
    plain.merge_adapter()
    check_equal(merged, dict(plain.named_parameters()))
    plain.unmerge_adapter()
    loss = plain(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(engine(input_ids=tokens, labels=tokens).loss, loss)
    check_equal(whole.state_dict(), plain.merge_and_unload().state_dict())
    engine.close()


def make_engine(model: nn.Module, stage: int) -> rayzero.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    return rayzero.initialize(model=model, config=config)[0]


def check_equal(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(values[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stage", [0, 3])
def test_adapters_are_exported_and_merged_as_by_peft(stage: int, tmp_path: Path) -> None:
    run_ranks(2, export_and_merge, stage, str(tmp_path))
