"""The pull backend: a real vault's slots, read through vLLM's interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayzero.engine.errors import ConfigError, EngineError
from rayzero.workers.weights.directory import WeightVersion
from tests.support.ranks import run_ranks
from tests.vllm import stand_in
from tests.vllm.support import Served, role_weights, with_plugin
from tests.workers.vault.support import VaultCluster
from tests.workers.weights.support import Net, Told, Trainer


class Vllm:
    """A client, and the worker behind it, made by vLLM's factory."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[str] = []
        self.info: dict[str, Any] = {}
        config = SimpleNamespace(backend="rayzero")
        self.engine = stand_in.WeightTransferEngineFactory.create_engine(
            config, SimpleNamespace(model_config=None), torch.device("cpu"), model
        )

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        self.calls.append("start")
        self.engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        self.engine.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(f"finish {weight_version}")
        self.engine.finish_weight_update()


@pytest.fixture(autouse=True)
def _plugin() -> Iterator[None]:
    with with_plugin():
        yield


@pytest.fixture
def cluster() -> Iterator[VaultCluster]:
    with closing(VaultCluster()) as cluster:
        yield cluster


def vault_weights(cluster: VaultCluster, told: Told, client: Any, engine: str | None = None) -> Any:
    from rayzero.vllm.vault_weights import VaultWeights

    return VaultWeights(role_weights(cluster, told), client, engine)


@pytest.mark.parametrize("world", [1, 3])
def test_each_version_is_loaded_once(cluster: VaultCluster, world: int) -> None:
    trainer, model = Trainer(cluster, {"": Net()}, ["a"] * world), Served()
    told, client = Told(), Vllm(model)
    weights = vault_weights(cluster, told, client)
    for step in range(5):
        told.directory = trainer.mirror(step)
        assert weights.refresh() == WeightVersion(1, step)
        assert model.equals(trainer.models[""])
        assert weights.refresh() == WeightVersion(1, step)
        trainer.change(step)
        assert not model.equals(trainer.models[""])
    each = [it for step in range(5) for it in ("start", "update", f"finish {step}")]
    assert client.calls == ["init", *each]


def load_elsewhere(rank: int, world: int, info: dict[str, Any]) -> list[Tensor]:
    """One of vLLM's workers: a process without a connection to the job."""
    with stand_in.installed():
        from rayzero.vllm.vault_engine import VaultWeightTransferEngine

        model = Served()
        config = SimpleNamespace(model_config=None)
        engine = VaultWeightTransferEngine(None, config, torch.device("cpu"), model)
        engine.start_weight_update()
        engine.update_weights(info)
        engine.finish_weight_update()
    return [model.embed.data, model.fused.data]


def test_workers_in_other_processes_read_the_slots(cluster: VaultCluster) -> None:
    trainer, model = Trainer(cluster, {"": Net()}), Served()
    client = Vllm(model)

    def update(info: dict[str, Any]) -> None:
        ((embed, fused),) = run_ranks(0, load_elsewhere, info)
        model.embed.data.copy_(embed)
        model.fused.data.copy_(fused)

    client.update_weights = update  # type: ignore[method-assign]
    vault_weights(cluster, Told(trainer.mirror(1)), client).refresh()
    assert model.equals(trainer.models[""])


def test_a_version_that_is_overwritten_meanwhile_is_never_finished(cluster: VaultCluster) -> None:
    trainer, model = Trainer(cluster, {"": Net()}), Served()
    told, client = Told(trainer.mirror(1)), Vllm(model)

    def overwrite() -> None:
        if model.loads == 1:
            for step in (2, 3, 4):
                trainer.change(step)
                told.directory = trainer.mirror(step)

    model.while_loading = overwrite
    assert vault_weights(cluster, told, client).refresh() == WeightVersion(1, 4)
    assert model.loads == 2
    assert client.calls == ["init", "start", "update", "start", "update", "finish 4"]
    assert model.equals(trainer.models[""])


def test_another_error_is_raised_and_the_next_update_is_whole(cluster: VaultCluster) -> None:
    trainer, model = Trainer(cluster, {"": Net()}), Served()
    client = Vllm(model)
    weights = vault_weights(cluster, Told(trainer.mirror(1)), client)

    def fail() -> None:
        if model.loads == 1:
            raise KeyError("unknown weight")

    model.while_loading = fail
    with pytest.raises(KeyError, match="unknown weight"):
        weights.refresh()
    assert not hasattr(model, "reloading")  # vLLM's loaders are what they were
    assert weights.refresh() == WeightVersion(1, 1)
    assert model.equals(trainer.models[""])


def test_one_of_several_engines_is_loaded(cluster: VaultCluster) -> None:
    nets = {"": Net(0), "policy": Net(1)}
    trainer, model = Trainer(cluster, nets), Served()
    told = Told(trainer.mirror(1))
    vault_weights(cluster, told, Vllm(model), "policy").refresh()
    assert model.equals(nets["policy"])
    with pytest.raises(ConfigError, match="weights of an engine 'critic'"):
        vault_weights(cluster, told, Vllm(model), "critic").refresh()


def test_workers_of_another_node_are_refused_with_a_reason(cluster: VaultCluster) -> None:
    engine = Vllm(Served()).engine
    engine.start_weight_update()
    with pytest.raises(EngineError, match="cannot be opened"):
        engine.update_weights({"slots": [[1, 0, 1, "b"]], "paths": ["/proc/1/fd/none"]})


def test_updates_out_of_order_are_refused(cluster: VaultCluster) -> None:
    engine = Vllm(Served()).engine
    with pytest.raises(EngineError, match="without start_weight_update"):
        engine.update_weights({"slots": [], "paths": []})
    engine.finish_weight_update()
    engine.shutdown()


def test_the_client_of_an_llm_forgets_prefixes() -> None:
    from rayzero.vllm.vault_weights import LLMClient

    calls: list[Any] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *arguments: calls.append((name, *arguments))

    names = ("init_weight_transfer_engine", "start_weight_update", "update_weights")
    llm = SimpleNamespace(
        **{it: note(it) for it in (*names, "finish_weight_update", "reset_prefix_cache")}
    )
    client = LLMClient(llm)
    assert isinstance(client, stand_in.VLLMWeightSyncClient)
    client.init_weight_transfer_engine({})
    client.start_weight_update()
    client.update_weights({"engine": None})
    client.finish_weight_update("7")
    assert calls == [
        ("init_weight_transfer_engine", {"init_info": {}}),
        ("start_weight_update",),
        ("update_weights", {"update_info": {"engine": None}}),
        ("finish_weight_update", "7"),
        ("reset_prefix_cache",),
    ]
