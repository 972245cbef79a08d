"""What training data the adapters take, and what their errors name; the rest is in
`tests/workers/launch/test_script.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import rayzero.data
from rayzero.data import StreamSampler
from rayzero.engine.errors import ConfigError
from rayzero.engine.state.registry import StateRegistry
from rayzero.huggingface.streams import check_train_dataset, check_training_data, choose_sampler
from tests.engine.data.streams.memory import MemorySource

datasets = pytest.importorskip("datasets")
accelerate = pytest.importorskip("accelerate")
SOURCE = MemorySource([5, 3, 8])
STREAM = rayzero.data.stream(SOURCE)
ITERABLE = rayzero.data.iterable(lambda *_: iter([1]), 1)
SESSION: Any = SimpleNamespace(registry=StateRegistry())


def test_dataset_that_trainer_cannot_read_is_refused() -> None:
    shard = type("DataIterator", (), {"__module__": "ray.data.iterator"})()
    given: list[Any] = []

    def init(trainer: Any, *args: Any, **options: Any) -> None:
        given.append(args[3] if args else options["train_dataset"])

    for right in (STREAM, [1], datasets.IterableDataset.from_generator(lambda: iter([]))):
        check_train_dataset(SESSION, init, None, train_dataset=right)
        check_train_dataset(SESSION, init, None, None, None, None, right)
        assert given.pop() is given.pop() is right
    for wrong, fix in [
        (SOURCE, r"train_dataset: rayzero\.data\.stream\(source\)"),
        (ITERABLE, r"train_dataset: rayzero\.data\.stream\(source\), of from_hf"),
        (shard, r"train_dataset: rayzero\.data\.from_ray\(dataset\)"),
        ("a/*.parquet", r"train_dataset: rayzero\.data\.stream\(rayzero\.data\.blocks\(paths\)\)"),
    ]:
        with pytest.raises(ConfigError, match=fix):
            check_train_dataset(SESSION, init, None, train_dataset=wrong)
    assert not given


def test_sampler_of_a_stream_is_its_own() -> None:
    def choose(trainer: Any, dataset: Any = None) -> str:
        return "trainer's"

    for strategy in ("random", "sequential", "group_by_length"):
        args = SimpleNamespace(train_sampling_strategy=strategy)
        trainer = SimpleNamespace(args=args, train_dataset=STREAM)
        assert choose_sampler(SESSION, choose, trainer, [1, 2]) == "trainer's"
        if strategy == "group_by_length":
            with pytest.raises(ConfigError, match="group_by_length"):
                choose_sampler(SESSION, choose, trainer)
        else:
            assert [*choose_sampler(SESSION, choose, trainer)] == [*StreamSampler(STREAM)]


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("way", ["plain", "shuffle", "sampler", "stream sampler", "accelerate"])
def test_a_data_loader_of_an_iterable_names_what_to_use(way: str, processes: int) -> None:
    def read() -> None:
        options: dict[str, Any] = {"shuffle": way == "shuffle", "num_workers": processes}
        if "sampler" in way:
            kind = StreamSampler if way == "stream sampler" else DistributedSampler
            options = {"sampler": kind(ITERABLE, 1, 0), "num_workers": processes}
        loader: Any = DataLoader(ITERABLE, **options)
        if way == "accelerate":
            loader = accelerate.Accelerator(cpu=True).prepare(loader)
        next(iter(loader))

    with pytest.raises(ConfigError, match=r"iterable\(\.\.\.\) was given to a DataLoader"):
        read()


def test_shards_divided_among_other_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    data = datasets.Dataset.from_dict({"n": [1, 2]}).to_iterable_dataset(num_shards=2)
    divided, dispatched = (type(name, (), {"dataset": data})() for name in LOADERS)
    check_training_data(SESSION, divided, first_ranks=2)
    check_training_data(SESSION, dispatched, first_ranks=1)
    with pytest.raises(ConfigError, match="among 1 ranks, now among 2") as refused:
        check_training_data(SESSION, divided, first_ranks=1)
    assert "rayzero.data.from_hf(dataset)" in refused.value.fix
    assert "dispatch_batches=True" in refused.value.allowed


LOADERS = ("DataLoaderShard", "DataLoaderDispatcher")


def test_stream_is_part_of_the_training_state() -> None:
    for _ in range(2):
        check_training_data(SESSION, SimpleNamespace(dataset=STREAM), first_ranks=1)
    assert "rayzero.stream" in SESSION.registry
