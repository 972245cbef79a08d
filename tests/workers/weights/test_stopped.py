"""A reader that is stopped in the middle of a refresh: the trainer does not notice."""

from __future__ import annotations

import os
import signal
from copy import deepcopy
from multiprocessing.connection import Connection
from time import monotonic, sleep
from typing import Any

import psutil
import pytest
import torch

from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.images import copy_bytes
from rayzero.workers.weights import images
from rayzero.workers.weights.directory import WeightDirectory
from rayzero.workers.weights.reader import WeightReader
from tests.support.processes import PROCESSES
from tests.workers.vault.support import VaultCluster
from tests.workers.weights.support import LIMIT_S, Net, Trainer, same_weights


def stop_within(connection: Connection, address: str, at: int) -> None:
    """Refreshes once; the process stops itself after so many copies. Sends the weights."""
    client = VaultClient(address, 7)
    newest: list[WeightDirectory] = []
    copies = iter(range(10**6))

    def find() -> WeightDirectory:
        while not newest or connection.poll():
            newest[:] = [connection.recv()]
        return newest[0]

    def stopping(into: memoryview, source: memoryview) -> None:
        copy_bytes(into, source)
        if next(copies) == at:
            os.kill(os.getpid(), signal.SIGSTOP)

    images.copy_bytes = stopping
    model = Net(seed=9)
    version = WeightReader(find, lambda: client, lambda: None, LIMIT_S).refresh(model)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    connection.send((version.step, weights))
    client.close()


@pytest.mark.slow
@pytest.mark.parametrize("node", ["a", "b"])
def test_the_trainer_goes_on_and_allocates_nothing(node: str, cluster: VaultCluster):
    trainer = Trainer(cluster, {"": Net()}, ["a", "a"])
    for step in range(3):
        trainer.mirror(step)
    first = deepcopy(trainer.models[""])
    address = cluster.vault(node).address()
    here, there = PROCESSES.Pipe()
    process: Any = PROCESSES.Process(target=stop_within, args=(there, address, 9), daemon=True)
    process.start()
    try:
        here.send(trainer.directory(2))
        deadline_s = monotonic() + LIMIT_S
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            assert monotonic() < deadline_s
            sleep(0.01)
        before = cluster.vault("a").usage()
        slots = [[id(writer) for writer in held] for held in trainer.slots]
        for step in range(3, 20):
            trainer.change(step)
            directory = trainer.mirror(step)
            usage = cluster.vault("a").usage()
            assert [usage[it] for it in ("slots", "replicas", "spare")] == [
                before[it] for it in ("slots", "replicas", "spare")
            ]
        assert [[id(writer) for writer in held] for held in trainer.slots] == slots
        here.send(directory)
        os.kill(process.pid, signal.SIGCONT)
        assert here.poll(LIMIT_S)
        step, weights = here.recv()
    finally:
        process.kill()
        process.join(10)
    # What it had mapped was overwritten; of a copy in its node's vault it could finish the version.
    assert step == (19 if node == "a" else 2)
    model = Net(seed=step)
    model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
    assert same_weights(model, trainer.models[""] if node == "a" else first)
