"""Versions of the weights to subscribers on the trainer's node, against memcpy of the tensors.

A trainer's slots are written without an engine: weights, and twice as many bytes of optimizer
state, cut over two ranks. Subscribers refresh models of their own at the same time; in turn they
copy the same tensors with numpy, and read a version. `--stopped` stops another one in the middle
of a refresh, and compares the time of a mirror.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import nn

from benchmarks.mirroring import no_peer
from benchmarks.step_time import Plan, describe_run
from rayzero.engine.layout.state_index import TensorRange
from rayzero.engine.state.ranges import StateBlock, StateRange, pack_block
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.records import SlotRef
from rayzero.workers.vault.slots import SlotChecksums, SlotWriter, checksum_of
from rayzero.workers.vault.vault import Vault
from rayzero.workers.weights import images
from rayzero.workers.weights.directory import WeightDirectory
from rayzero.workers.weights.reader import WeightReader

RANKS, NODE, LAYER_BYTES = 2, "node", 16 * 2**20


class Model(nn.Module):
    def __init__(self, nbytes: int) -> None:
        super().__init__()
        shape = 2048, LAYER_BYTES // 4 // 2048
        made = [nn.Parameter(torch.rand(shape)) for _ in range(nbytes // LAYER_BYTES)]
        self.layers = nn.ParameterList(made)


class Ranks:
    """The slots of a trainer's ranks, in two buffers in turn."""

    def __init__(self, nbytes: int, address: str) -> None:
        model = Model(nbytes)
        self._blocks = [_share(model, rank) for rank in range(RANKS)]
        self.clients = [VaultClient(address, 50 + rank) for rank in range(RANKS)]
        self._slots: list[list[SlotWriter]] = [[] for _ in self._blocks]

    def mirror(self, step: int) -> WeightDirectory:
        for rank, block in enumerate(self._blocks):
            held = self._slots[rank]
            if len(held) < 2:
                held.append(self.clients[rank].reserve(1, rank, RANKS, block.index))
            _write(held[step % 2], block, step)
        return WeightDirectory(tuple(SlotRef(1, rank, step, NODE) for rank in range(RANKS)))


def _share(model: nn.Module, rank: int) -> StateBlock:
    parts = []
    for kind in ("optimizer.exp_avg", "optimizer.exp_avg_sq", "weights"):
        for name, param in model.named_parameters():
            full, flat = f"{kind}/{name}", param.detach().reshape(-1)
            start, stop = (flat.numel() * (rank + step) // RANKS for step in (0, 1))
            held = TensorRange(full, start, stop, 0)
            parts.append(StateRange(flat[start:stop], (held,), {full: tuple(param.shape)}))
    return pack_block(parts)


def _write(slot: SlotWriter, block: StateBlock, step: int) -> None:
    slot.begin()
    block.copy_to(slot.data, constants=True)
    size = slot.weight_bytes
    sums = SlotChecksums(checksum_of(slot.data[:size], 4), checksum_of(slot.data[size:], 4))
    slot.commit(step, b'{"step": 1}', False, sums)


def subscribe(number: int, address: str, nbytes: int, connection: Any, barrier: Any) -> None:
    """Main function of a subscriber; sends [memcpy s, version s, private bytes] for each."""
    torch.set_num_threads(1)
    client, told = VaultClient(address, number), list[WeightDirectory]()
    model = Model(nbytes)
    reader = WeightReader(lambda: told[-1], lambda: client, lambda: None, 60.0)
    flats = [param.detach().reshape(-1).view(torch.uint8).numpy() for param in model.parameters()]
    private = _private_bytes()
    while (directory := connection.recv()) is not None:
        told.append(directory)
        views = _open(client, directory, nbytes)
        times = [
            _time(barrier, partial(_copy, flats, views)),
            _time(barrier, partial(reader.refresh, model)),
        ]
        del views
        connection.send([*times, _private_bytes() - private])
    client.close()


def _time(barrier: Any, action: Callable[[], object]) -> float:
    """Seconds until all subscribers have done it."""
    barrier.wait()
    start = perf_counter()
    action()
    barrier.wait()
    return perf_counter() - start


def _open(client: VaultClient, directory: WeightDirectory, nbytes: int) -> list[Any]:
    """The weights of all ranks as they are in the slots, touched."""
    mappings, views = images.SlotMappings(), []
    for ref in directory.slots:
        fd = client.open_weights(ref)
        if fd is None:
            raise RuntimeError("another node's")
        image = mappings.map(ref, fd)
        os.close(fd)
        data = np.frombuffer(image._bytes, np.uint8)[image.header.data_offset :]
        views += np.split(data[: nbytes // RANKS], nbytes // LAYER_BYTES)
    for view in views:
        view[::4096].max()
    return views


def _copy(flats: list[Any], views: list[Any]) -> None:
    half = LAYER_BYTES // RANKS
    for number, view in enumerate(views):
        layer, rank = number % len(flats), number // len(flats)
        np.copyto(flats[layer][rank * half : (rank + 1) * half], view)


def _private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def stop_within(address: str, nbytes: int, directory: WeightDirectory) -> None:
    """Main function of a subscriber that stops itself in the middle of a refresh."""
    copy_bytes, copies = images.copy_bytes, iter(range(10**9))

    def stopping(into: memoryview, source: memoryview) -> None:
        copy_bytes(into, source)
        if next(copies) == nbytes // images.PIECE_BYTES // 2:
            os.kill(os.getpid(), signal.SIGSTOP)

    images.copy_bytes = stopping
    client = VaultClient(address, 99)
    WeightReader(lambda: directory, lambda: client, lambda: None, 60.0).refresh(Model(nbytes))


def measure(options: argparse.Namespace, vault: Vault) -> dict[str, Any]:
    nbytes = options.megabytes * 2**20 // LAYER_BYTES * LAYER_BYTES
    address, processes = vault.address(), mp.get_context("spawn")
    ranks = Ranks(nbytes, address)
    barrier, pipes = processes.Barrier(options.subscribers), []
    for number in range(options.subscribers):
        here, there = processes.Pipe()
        args = (number, address, nbytes, there, barrier)
        processes.Process(target=subscribe, args=args, daemon=True).start()
        pipes.append(here)
    step = 0
    rows: list[list[list[float]]] = []
    for step in range(options.versions + 4):  # the first ones map the slots
        directory = ranks.mirror(step)
        for pipe in pipes:
            pipe.send(directory)
        rows.append([pipe.recv() for pipe in pipes])
    for pipe in pipes:
        pipe.send(None)
    measured: dict[str, Any] = {
        "bytes": nbytes,
        "memcpy_s": [max(it[0] for it in each) for each in rows[4:]],
        "refresh_s": [max(it[1] for it in each) for each in rows[4:]],
        "private_bytes": max(it[2] for each in rows for it in each),
    }
    if options.stopped:
        measured |= _with_stopped(ranks, step, address, nbytes, processes, vault)
    for client in ranks.clients:
        client.close()
    return measured


def _with_stopped(
    ranks: Ranks, step: int, address: str, nbytes: int, processes: Any, vault: Vault
) -> dict[str, Any]:
    def mirror_times() -> list[float]:
        nonlocal step
        times = []
        for _ in range(20):
            step += 1
            start = perf_counter()
            ranks.mirror(step)
            times.append(perf_counter() - start)
        return times

    before = mirror_times()
    args = (address, nbytes, ranks.mirror(step := step + 1))
    reader = processes.Process(target=stop_within, args=args, daemon=True)
    reader.start()
    stat = Path(f"/proc/{reader.pid}/stat")
    while ") T" not in stat.read_text():
        sleep(0.01)
    used = vault.usage()["slots"]
    during = mirror_times()
    reader.kill()
    return {"mirror_s": [before, during], "allocated": vault.usage()["slots"] - used}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400, help="of weights")
    parser.add_argument("--subscribers", type=int, default=2)
    parser.add_argument("--versions", type=int, default=20)
    parser.add_argument("--stopped", action="store_true", help="see above")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    vault = Vault("weights", NODE, no_peer)
    try:
        measured = measure(options, vault)
    finally:
        vault.close()
    copied, read = (measured[name] for name in ("memcpy_s", "refresh_s"))
    ratio = median(b / a for a, b in zip(copied, read, strict=True))
    print(
        f"{measured['bytes'] / 2**20:.0f} MiB to {options.subscribers} subscribers: memcpy "
        f"{median(copied) * 1e3:.0f} ms, a version {median(read) * 1e3:.0f} ms (at least "
        f"{min(read) * 1e3:.0f}); paired ratio {ratio:.2f}; private memory "
        f"{measured['private_bytes'] / 2**20:+.1f} MiB"
    )
    if options.stopped:
        before, during = (
            f"{median(times) * 1e3:.0f} ms (at least {min(times) * 1e3:.0f})"
            for times in measured["mirror_s"]
        )
        print(
            f"a mirror of both ranks: {before}, with a stopped subscriber {during}; "
            f"allocated for it: {measured['allocated']} bytes"
        )
    if options.json:
        facts = describe_run(Plan([], 0, 0, RANKS, 1))
        options.json.write_text(json.dumps(facts | measured, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
