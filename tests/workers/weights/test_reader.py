"""Versions read into a model of another process, on the trainer's node."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import nn

from rayzero.engine.checkpoint.errors import CheckpointMismatchError
from rayzero.engine.errors import ConfigError
from rayzero.workers.vault import slots
from rayzero.workers.vault.images import copy_bytes
from rayzero.workers.weights import images
from rayzero.workers.weights.directory import WeightVersion
from rayzero.workers.weights.reader import NoVersionError
from tests.workers.vault.support import VaultCluster, damage
from tests.workers.weights.support import (
    Net,
    Told,
    Trainer,
    make_reader,
    same_weights,
)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all copies from slots, also of indexes and metadata."""
    sizes: list[int] = []

    def counted(into: memoryview, source: memoryview) -> None:
        sizes.append(len(into))
        copy_bytes(into, source)

    monkeypatch.setattr(images, "copy_bytes", counted)
    return sizes


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("hashed", [True, False])
def test_each_version_arrives(cluster: VaultCluster, world: int, hashed: bool):
    trainer = Trainer(cluster, {"": Net()}, ["a"] * world, hashed=hashed)
    told, model = Told(), Net(seed=9)
    reader = make_reader(cluster, told)
    assert reader.newest is None
    addresses = [it.data_ptr() for it in model.state_dict().values()]
    for step in range(6):
        told.directory = trainer.mirror(step)
        assert reader.newest == WeightVersion(1, step)
        assert reader.refresh(model) == WeightVersion(1, step)
        assert same_weights(model, trainer.models[""])
        trainer.change(step)
    assert [it.data_ptr() for it in model.state_dict().values()] == addresses
    assert model.head.weight is model.embed.weight


def test_nothing_is_read_of_a_version_that_is_there(cluster: VaultCluster, copied: list[int]):
    trainer = Trainer(cluster, {"": Net()})
    reader, model = make_reader(cluster, Told(trainer.mirror(3))), Net(seed=9)
    reader.refresh(model)
    copied.clear()
    assert reader.refresh(model) == WeightVersion(1, 3)
    assert copied == []
    other = Net(seed=8)
    reader.refresh(other)
    assert same_weights(other, trainer.models[""])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_cast(
    cluster: VaultCluster, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rayzero.engine.state.ranges.CAST_BYTES", 100)  # in several parts
    trainer = Trainer(cluster, {"": Net()})
    model = Net(seed=9, dtype=dtype)
    make_reader(cluster, Told(trainer.mirror(1))).refresh(model)
    expected = Net().to(torch.float64)
    expected.load_state_dict(trainer.models[""].state_dict())
    assert same_weights(model, expected.to(dtype))


def test_other_memory_formats_and_untied_weights(cluster: VaultCluster):
    trained = nn.ModuleDict({"a": nn.Conv2d(3, 4, 3), "b": nn.Conv2d(3, 4, 3)})
    trained["b"].weight = trained["a"].weight
    trainer = Trainer(cluster, {"": trained})
    model = nn.ModuleDict({"a": nn.Conv2d(3, 4, 3), "b": nn.Conv2d(3, 4, 3)})
    model["a"].to(memory_format=torch.channels_last)
    make_reader(cluster, Told(trainer.mirror(1))).refresh(model)
    assert same_weights(model, trained)
    assert model["a"].weight.is_contiguous(memory_format=torch.channels_last)


def test_engines_are_read_by_name(cluster: VaultCluster):
    policy, critic = Net(1), nn.Sequential(nn.Linear(7, 3))
    trainer = Trainer(cluster, {"": policy, "critic": critic}, first_name="policy")
    reader = make_reader(cluster, Told(trainer.mirror(1)))
    model = Net(seed=9)
    for name in ("policy", None):
        nn.init.zeros_(model.embed.weight)
        reader.refresh(model, engine=name)
        assert same_weights(model, policy)
    second = nn.Sequential(nn.Linear(7, 3))
    reader.refresh(second, engine="critic")
    assert same_weights(second, critic)
    with pytest.raises(ConfigError, match="'polcy'\n  allowed: policy, critic"):
        reader.refresh(model, engine="polcy")


def test_one_engine_is_read_by_the_name_that_it_has_or_lacks(cluster: VaultCluster):
    trainer = Trainer(cluster, {"": Net(1)})
    model = Net(seed=9)
    make_reader(cluster, Told(trainer.mirror(1))).refresh(model, engine="policy")
    assert same_weights(model, trainer.models[""])
    trainer.first_name = "policy"
    reader = make_reader(cluster, Told(trainer.mirror(2)))
    with pytest.raises(ConfigError, match="allowed: policy"):
        reader.refresh(model, engine="critic")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda net: setattr(net, "more", nn.Linear(1, 1)), "weights/more.weight"),
        (lambda net: delattr(net, "body"), "weights/body.0.weight"),
        (lambda net: setattr(net.body, "0", nn.Linear(5, 34)), r"\[33, 5\] in the state and \[34"),
    ],
)
def test_another_model_is_refused(
    cluster: VaultCluster, change: Callable[[Any], object], text: str
):
    trainer = Trainer(cluster, {"": Net()})
    model = Net(seed=9)
    change(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match=text) as raised:
        make_reader(cluster, Told(trainer.mirror(1))).refresh(model)
    assert "the trainer's state is of another model" in str(raised.value)
    assert all(torch.equal(before[name], it) for name, it in model.state_dict().items())


def test_a_version_of_adapters_is_their_bytes(cluster: VaultCluster, copied: list[int]):
    frozen = ["embed.weight", "body.0.weight"]
    trainer = Trainer(cluster, {"": Net()}, frozen=frozen)
    told, model = Told(trainer.mirror(1)), Net(seed=9)
    reader = make_reader(cluster, told)
    reader.refresh(model)
    names = dict(model.named_parameters())
    adapters = sum(it.nbytes for name, it in names.items() if name not in frozen)
    adapters += sum(it.nbytes for it in model.buffers())
    for step in (2, 3):
        trainer.change(step)
        told.directory = trainer.mirror(step)
        copied.clear()
        reader.refresh(model)
        metadata = len(trainer.metadata(0))
        assert sum(copied) == adapters + metadata
        assert same_weights(model, trainer.models[""])
    trainer.models[""].get_parameter("embed.weight").data.normal_()  # by the training function
    told.directory = trainer.mirror(4)
    reader.refresh(model)
    assert same_weights(model, trainer.models[""])


def test_parts_of_any_size_have_the_checksum_of_the_whole(
    cluster: VaultCluster, monkeypatch: pytest.MonkeyPatch
):
    trainer = Trainer(cluster, {"": Net()})
    for chunk in (64, 1000, 1008, 10**6):
        monkeypatch.setattr(slots, "CHUNK_BYTES", chunk)
        monkeypatch.setattr(images, "PIECE_BYTES", 100)
        model = Net(seed=9)
        make_reader(cluster, Told(trainer.mirror(chunk))).refresh(model)
        assert same_weights(model, trainer.models[""])


def test_a_slot_that_is_overwritten_is_given_up_for_the_newest_version(
    cluster: VaultCluster, monkeypatch: pytest.MonkeyPatch
):
    """At each copy in turn; the second slot too, which the reader has not come to."""
    monkeypatch.setattr(images, "PIECE_BYTES", 256)
    trainer, told = Trainer(cluster, {"": Net()}, ["a"]), Told()
    steps = iter(range(10**6))
    number = done = -1
    retries = 0

    def overwriting(into: memoryview, source: memoryview) -> None:
        nonlocal done
        done += 1
        copy_bytes(into[: len(into) // 2], source[: len(into) // 2])
        if done == number:
            for _ in range(2):
                trainer.change(done)
                told.directory = trainer.mirror(next(steps))
        copy_bytes(into[len(into) // 2 :], source[len(into) // 2 :])

    monkeypatch.setattr(images, "copy_bytes", overwriting)
    while done >= number:
        number += 1
        done = -1
        trainer.change(number)
        told.directory = trainer.mirror(next(steps))
        model = Net(seed=9)
        reader = make_reader(cluster, told)
        version = reader.refresh(model)
        assert version == told.directory.version
        assert same_weights(model, trainer.models[""])
        retries += done >= number
    assert retries > 20


def test_damage_is_no_version(cluster: VaultCluster):
    trainer = Trainer(cluster, {"": Net()}, frozen=["embed.weight"])
    told, model = Told(trainer.mirror(1)), Net(seed=9)
    rank_1 = told.directory.slots[1]
    for part in ("weight_bytes", "constant_bytes"):
        damage(
            cluster.vault(),
            rank_1,
            lambda image, part=part: image.header.data_offset + getattr(image.header, part) - 130,
        )
        with pytest.raises(NoVersionError, match=r"rank 1, step 1 .* is damaged: its weights"):
            make_reader(cluster, told, limit_s=0.01).refresh(model)
        trainer.mirror(2)
        trainer.mirror(1)
    reader = make_reader(cluster, told)
    reader.refresh(model)
    # Of no concern: it is the optimizer's.
    told.directory = trainer.mirror(3)
    rest = lambda image: image.header.data_offset + image.header.data_bytes - 1  # noqa: E731
    damage(cluster.vault(), told.directory.slots[0], rest)
    reader.refresh(model)
    assert same_weights(model, trainer.models[""])


def test_the_wait_for_the_first_version_ends(cluster: VaultCluster):
    trainer, told, model = Trainer(cluster, {"": Net()}), Told(), Net(seed=9)
    with pytest.raises(NoVersionError, match=r"for 0\.02 s: the trainer has mirrored no step yet"):
        make_reader(cluster, told, limit_s=0.02).refresh(model)
    waited, stop = Event(), Event()

    def check() -> None:
        waited.set()
        if stop.is_set():
            raise SystemExit

    reader = make_reader(cluster, told, check=check)
    thread = Thread(target=reader.refresh, args=(model,))
    thread.start()
    assert waited.wait(60)
    told.directory = trainer.mirror(0)
    thread.join(60)
    assert same_weights(model, trainer.models[""])
    told.directory = trainer.directory(5)  # which is not there
    stop.set()
    with pytest.raises(SystemExit):
        reader.refresh(model)


def test_a_version_that_went_half_way_is_not_taken_for_there(
    cluster: VaultCluster, monkeypatch: pytest.MonkeyPatch
):
    trainer = Trainer(cluster, {"": Net()})
    told, model = Told(trainer.mirror(1)), Net(seed=9)
    reader = make_reader(cluster, told)
    reader.refresh(model)
    trainer.change(1)
    told.directory = trainer.mirror(2)

    copies = iter(range(10))

    def fail(into: memoryview, source: memoryview) -> None:
        copy_bytes(into, source)
        if next(copies) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(images, "copy_bytes", fail)
    with pytest.raises(KeyboardInterrupt):
        reader.refresh(model)
    monkeypatch.setattr(images, "copy_bytes", copy_bytes)
    told.directory = trainer.directory(1)
    reader.refresh(model)
    assert not same_weights(model, trainer.models[""])
    told.directory = trainer.directory(2)
    reader.refresh(model)
    assert same_weights(model, trainer.models[""])


def test_mappings_of_freed_buffers_are_dropped(cluster: VaultCluster):
    told, model = Told(), Net(seed=9)
    reader = make_reader(cluster, told)
    for generation in range(1, 5):
        trainer = Trainer(cluster, {"": Net()}, generation=generation)
        for step in range(5):
            told.directory = trainer.mirror(step)
            reader.refresh(model)
        assert len(reader._mappings._memory) <= 2 * (images.KEPT_TURNS + 1)
    for step in range(5, 5 + images.KEPT_TURNS + 2):
        told.directory = trainer.mirror(step)
        reader.refresh(model)
    assert len(reader._mappings._memory) == 4
