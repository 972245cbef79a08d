"""The blocks of docs/vllm.md run as written, on the stand-in."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import rayzero
from tests.house.blocks import blocks
from tests.support.ranks import run_ranks
from tests.vllm import stand_in
from tests.vllm.support import Served, role_weights, with_plugin
from tests.workers.vault.support import VaultCluster
from tests.workers.weights.support import Net, Told, Trainer

PULL, PUSH = (it.text for it in blocks("docs/vllm.md") if it.language == "python")


class Tasks(list[Any]):
    group = 2


def test_a_generator_pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in.LLM, "made", Served(), raising=False)
    done: list[Any] = []
    with closing(VaultCluster()) as cluster, with_plugin():
        trainer = Trainer(cluster, {"": Net(0), "policy": Net(1)})
        told = Told(trainer.mirror(7))
        prompts = [SimpleNamespace(text=it) for it in ("a", "b")]
        tasks = Tasks([SimpleNamespace(prompts=prompts, done=done.append)])
        ctx = SimpleNamespace(
            args={"model": "m"}, weights=role_weights(cluster, told), tasks=lambda prompts: tasks
        )
        names: dict[str, Any] = {"make_samples": list}
        exec(compile(PULL, "docs/vllm.md", "exec", dont_inherit=True), names)
        names["generate"](ctx)
        assert stand_in.LLM.made.equals(trainer.models["policy"])
    assert done == [[["A 7"] * 2, ["B 7"] * 2]]


def push(rank: int, world: int) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    engine, *_ = rayzero.initialize(model=model, config=config | {"optimizer": {"type": "Adam"}})
    names = {"torch": torch, "engine": engine, "address": "a", "port": 1, "world_size": 3}
    with stand_in.installed():
        exec(compile(PUSH, "docs/vllm.md", "exec", dont_inherit=True), names)
        assert names["trainer"].init_info.rank == rank
        return names["trainer"].send_weights()


def test_a_trainer_pushes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(torch.bfloat16)
    for sent in run_ranks(2, push):
        assert [name for name, _ in sent] == [name for name, _ in model.named_parameters()]
        for (_, value), param in zip(sent, model.parameters(), strict=True):
            assert torch.equal(value, param)
