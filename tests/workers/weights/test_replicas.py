"""Versions on another node: copied once for all readers of this one."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from time import monotonic, sleep

import pytest

from rayzero.workers.vault import images
from rayzero.workers.vault.records import SlotRef, VaultGoneError, VaultMemoryError
from rayzero.workers.vault.slots import HEADER_BYTES
from rayzero.workers.vault.weight_replicas import FETCHES
from rayzero.workers.weights.directory import WeightVersion
from rayzero.workers.weights.reader import NoVersionError
from tests.workers.vault.support import VaultCluster, damage, open_fds, wait_for_fds
from tests.workers.weights.support import Net, Told, Trainer, make_reader, same_weights


def prefix_bytes(trainer: Trainer, *, constants: bool = True) -> int:
    """Of all ranks: index, metadata, weights and buffers."""
    total = 0
    for rank in range(len(trainer.nodes)):
        [writer, *_] = trainer.slots[rank]
        header = writer._header
        total += header.index_bytes + header.metadata_bytes + header.weight_bytes
        total -= 0 if constants else header.constant_bytes
    return total


def test_a_version_is_copied_once_and_no_more_than_its_weights(cluster: VaultCluster):
    trainer = Trainer(cluster, {"": Net()}, ["a", "c"], frozen=["embed.weight"])
    told = Told(trainer.mirror(1))
    readers = [make_reader(cluster, told, "b") for _ in range(3)]
    models = [Net(seed=9) for _ in readers]
    for constants in (True, False, False, False):
        with ThreadPoolExecutor(3) as threads:
            versions = [
                *threads.map(
                    lambda pair: pair[0].refresh(pair[1]), zip(readers, models, strict=True)
                )
            ]
        assert {*versions} == {told.directory.version}
        assert all(same_weights(model, trainer.models[""]) for model in models)
        headers = [it for it in cluster.fetched if it[1] == 0]
        assert {length for _, _, length in headers} == {HEADER_BYTES}, (
            "the other vault hashes nothing"
        )
        copied = [it for it in cluster.fetched if it[1]]
        expected = prefix_bytes(trainer, constants=constants)
        assert sum(length for _, _, length in copied) == expected, "constants are here already"
        cluster.fetched.clear()
        trainer.change(versions[0].step)
        told.directory = trainer.mirror(versions[0].step + 1)


def test_a_replica_that_is_here_anyway_is_read(cluster: VaultCluster):
    trainer = Trainer(cluster, {"": Net()}, ["a"])
    directory = trainer.mirror(1)
    cluster.vault("b").replicate(directory.slots)
    cluster.fetched.clear()
    model = Net(seed=9)
    make_reader(cluster, Told(directory), "b").refresh(model)
    assert same_weights(model, trainer.models[""])
    assert cluster.fetched == []


def test_several_chunks_are_in_flight(cluster: VaultCluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(images, "FETCH_CHUNK_BYTES", 400)
    trainer = Trainer(cluster, {"": Net()}, ["a"])
    told, model = Told(trainer.mirror(1)), Net(seed=9)
    together = Barrier(FETCHES)
    met = []

    def meet(ref: SlotRef, offset: int) -> None:
        if offset and not met:
            together.wait(60)
            met.append(offset)

    cluster.on_fetch = meet
    make_reader(cluster, told, "b").refresh(model)
    assert met
    assert same_weights(model, trainer.models[""])


def test_memory_is_bounded_and_freed(cluster: VaultCluster):
    before = open_fds("rayzero-slot")
    trainer = Trainer(cluster, {"": Net()}, ["a", "a"])
    told, vault = Told(), cluster.vault("b")
    readers = [make_reader(cluster, told, "b") for _ in range(2)]
    models = [Net(seed=9) for _ in readers]
    usages = []
    for step in range(8):
        trainer.change(step)
        told.directory = trainer.mirror(step)
        for reader, model in zip(readers, models, strict=True):
            reader.refresh(model)
            assert same_weights(model, trainer.models[""])
        usages.append(vault.usage()["replicas"])
    assert len({*usages[1:]}) == 1
    assert usages[1] == 2 * usages[0] > 0
    later = Trainer(cluster, {"": Net(4)}, ["a"], generation=2)
    told.directory = later.mirror(9)
    assert readers[0].refresh(models[0]) == WeightVersion(2, 9)
    assert same_weights(models[0], later.models[""])
    assert vault.usage()["replicas"] < usages[0]
    told.directory = trainer.directory(7)  # a repair goes back to what is left
    assert readers[1].refresh(Net(seed=8)) == WeightVersion(1, 7)
    assert vault.usage()["replicas"] == usages[0]
    for client in cluster.clients:
        if client.address == vault.address():
            client.close()
    until(lambda: vault.usage()["replicas"] == 0)
    del readers, reader
    gc.collect()
    trainers = sum(len(held) for it in (trainer, later) for held in it.slots)
    wait_for_fds(before + 2 * trainers, "rayzero-slot")  # in the vault, and mapped by the rank


def until(holds) -> None:
    deadline_s = monotonic() + 60
    while not holds():
        assert monotonic() < deadline_s
        sleep(0.002)


@pytest.mark.parametrize("at", range(0, 7, 2))
def test_a_slot_that_is_overwritten_during_the_copy(
    cluster: VaultCluster, at: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(images, "FETCH_CHUNK_BYTES", 1000)
    trainer = Trainer(cluster, {"": Net()}, ["a"])
    told, model = Told(trainer.mirror(1)), Net(seed=9)
    fetches = iter(range(10**6))

    def overwrite(ref: SlotRef, offset: int) -> None:
        if next(fetches) == at:
            for step in (2, 3):
                trainer.change(step)
                told.directory = trainer.mirror(step)

    cluster.on_fetch = overwrite
    assert make_reader(cluster, told, "b").refresh(model) == WeightVersion(1, 3)
    assert next(fetches) > at
    assert same_weights(model, trainer.models[""])


def test_damage_on_the_way_is_found(cluster: VaultCluster):
    trainer = Trainer(cluster, {"": Net()}, ["a"])
    told, model = Told(trainer.mirror(1)), Net(seed=9)
    damage(
        cluster.vault("a"),
        told.directory.slots[0],
        lambda image: image.header.data_offset + image.header.weight_bytes - 130,
    )
    before = {name: it.clone() for name, it in model.state_dict().items()}
    with pytest.raises(NoVersionError, match="step 1 on node a is damaged: its data"):
        make_reader(cluster, told, "b", limit_s=0.3).refresh(model)
    assert all(bool((before[name] == it).all()) for name, it in model.state_dict().items())
    told.directory = trainer.mirror(2)
    make_reader(cluster, told, "b").refresh(model)
    assert same_weights(model, trainer.models[""])


def test_a_vault_that_hangs_holds_up_neither_ranks_nor_the_readers_end(cluster: VaultCluster):
    trainer = Trainer(cluster, {"": Net()}, ["a"])
    told, model = Told(trainer.mirror(1)), Net(seed=9)
    hangs, resumed = Event(), Event()

    def hang(ref: SlotRef, offset: int) -> None:
        hangs.set()
        resumed.wait(60)

    cluster.on_fetch = hang

    def check() -> None:
        if hangs.is_set():
            raise SystemExit

    with pytest.raises(SystemExit):
        make_reader(cluster, told, "b", check).refresh(model)
    ranks = Trainer(cluster, {"": Net()}, ["b"], generation=3)
    ranks.mirror(1)  # on the reader's node
    assert cluster.vault("b").poll(0.0) == []
    resumed.set()


def test_without_room_the_reader_fails(cluster: VaultCluster):
    trainer = Trainer(cluster, {"": Net()}, ["a"])
    told, model = Told(trainer.mirror(1)), Net(seed=9)
    cluster.vault("b", available=lambda: 1000)
    with pytest.raises(VaultMemoryError, match="more shared memory"):
        make_reader(cluster, told, "b").refresh(model)
    assert cluster.vault("b").usage()["replicas"] == 0


def test_the_other_vault_is_lost(cluster: VaultCluster):
    trainer = Trainer(cluster, {"": Net()}, ["a"])
    told, model = Told(trainer.mirror(1)), Net(seed=9)

    def lost(ref: SlotRef, offset: int) -> None:
        if ref.node_id == "a":
            told.directory = later.mirror(1)
            raise VaultGoneError("the vault on node a is gone")

    later = Trainer(cluster, {"": Net(5)}, ["c"], generation=2)
    cluster.on_fetch = lost
    assert make_reader(cluster, told, "b").refresh(model) == WeightVersion(2, 1)
    assert same_weights(model, later.models[""])
