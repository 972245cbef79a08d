"""Messages in flight outlive an engine; gloo threads stop before the interpreter exits."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rayzero
from rayzero.engine.comm.backend import rank_chunk
from rayzero.engine.comm.gloo_p2p import p2p_channel
from rayzero.engine.comm.shared_memory import make_gloo_backend
from rayzero.workers.group_sockets import _open_sockets
from tests.support.ports import free_ports
from tests.support.ranks import run_ranks

LIMIT_S = 60.0


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def run_in_order(rank: int, *, first: Callable[[], None], then: Callable[[], None]) -> None:
    """Rank 1 calls `first`, and only then rank 0 calls `then`. They synchronize through the store,
    which sends no message in the group."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        first()
        store.set("first", "done")
    else:
        store.wait(["first"])
        then()


def drop_backend(rank: int, world: int, share: bool) -> tuple[float, int]:
    """Rank 1 drops its backend before rank 0's messages to it are sent."""
    backends = [make_gloo_backend(world_group(), share_memory=share)]
    full = backends[0].zeros(4 * world, torch.float32, torch.device("cpu"))
    launched = [backends[0].all_gather(full, rank_chunk(full, rank, world))] if rank == 1 else []

    def first() -> None:
        launched.clear()
        backends.clear()
        gc.collect()

    def then() -> None:
        other = backends[0].all_gather(full, rank_chunk(full, rank, world))
        if not share:  # shared memory of an exited peer cannot be read
            other.wait()

    run_in_order(rank, first=first, then=then)
    channel = p2p_channel(world_group())
    in_flight = len(channel.in_flight)
    value = torch.tensor(float(rank))
    dist.all_reduce(value)
    new_backend = make_gloo_backend(world_group(), share_memory=share)
    # With shared memory, rank 1 never confirmed that it read rank 0's part.
    assert len(channel.in_flight) == (in_flight if share else 0)
    full = new_backend.zeros(4 * world, torch.float32, torch.device("cpu"))
    rank_chunk(full, rank, world).fill_(rank + 1)
    new_backend.all_gather(full, rank_chunk(full, rank, world)).wait()
    return value.item() + full.sum().item(), in_flight


def close_for_sending(descriptors: Iterable[int]) -> None:
    """What is sent to other ranks from now on fails, but they do not notice it yet."""
    for descriptor in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_WR)


def finish_after_peer(rank: int, world: int) -> str:
    """Rank 0 confirms an exchange to rank 1, which has finished it, over a lost connection."""
    before = _open_sockets().keys()
    backend = make_gloo_backend(dist.new_group(), share_memory=True)
    sockets = [number for inode, number in _open_sockets().items() if inode not in before]
    full = backend.zeros(4 * world, torch.float32, torch.device("cpu"))
    rank_chunk(full, rank, world).fill_(rank + 1)
    work = backend.all_gather(full, rank_chunk(full, rank, world))
    store = dist.PrefixStore("finish", dist.distributed_c10d._get_default_store())
    if rank == 1:
        work.wait()
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)  # gloo's thread, too: it does not see the end
        store.wait(["told"])
        return ""
    pid = int(store.get("pid"))
    while "State:\tT" not in Path(f"/proc/{pid}/status").read_text():
        pass
    close_for_sending(sockets)
    work.wait()
    os.kill(pid, signal.SIGCONT)
    work.release()
    assert full.sum() == 4 * 3
    with pytest.raises(RuntimeError) as caught:
        backend.all_gather(full, rank_chunk(full, rank, world)).release()
    store.set("told", "")
    return str(caught.value)


def test_confirmation_over_a_lost_connection_is_not_waited_for() -> None:
    """gloo ends a wait for such a send at the group's timeout only (torch 2.13)."""
    assert "Connection closed" in run_ranks(2, finish_after_peer, timeout_s=LIMIT_S)[0]


@pytest.mark.parametrize("share", [True, False], ids=["shared", "messages"])
def test_group_works_after_a_receiver_is_dropped(share: bool) -> None:
    results = run_ranks(2, drop_backend, share, timeout_s=LIMIT_S)
    assert [total for total, _ in results] == [1.0 + 4 * 3] * 2
    assert results[1][1] > 0, "rank 1 has messages in flight"


def train(rank: int, world: int, stage: int) -> list[int]:
    in_flight = []
    for _ in range(20):
        model = nn.Linear(4, 2)
        config: dict[str, Any] = {
            "train_batch_size": world,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "zero_optimization": {"stage": stage},
        }
        engine, *_ = rayzero.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        del engine, model
        gc.collect()
        in_flight.append(len(p2p_channel(world_group()).in_flight))
    return in_flight


@pytest.mark.parametrize("stage", [1, 3])
def test_sequential_engines_in_a_group(stage: int) -> None:
    """None is closed; each drains the messages of its predecessor."""
    for in_flight in run_ranks(2, train, stage, timeout_s=LIMIT_S):
        assert max(in_flight) <= 8, in_flight


def use_two_backends(rank: int, world: int) -> float:
    """A backend is created before all peers have read another's finished exchanges."""
    backends = [make_gloo_backend(world_group(), share_memory=True)]
    full = backends[0].zeros(4 * world, torch.float32, torch.device("cpu"))
    rank_chunk(full, rank, world).fill_(rank + 1)
    first = backends[0].all_gather(full, rank_chunk(full, rank, world))
    first.wait()
    backends.append(make_gloo_backend(world_group(), share_memory=True))
    assert not p2p_channel(world_group()).in_flight
    first.release()  # a second release does not wait
    backends[0].all_gather(full, rank_chunk(full, rank, world)).release()
    return full.sum().item()


def test_two_backends_of_a_group() -> None:
    assert run_ranks(2, use_two_backends, timeout_s=LIMIT_S) == [4.0 * 3] * 2


ROOT = Path(__file__).parents[3]
# One interpreter imports, and forks a process per creator and rank: each exits as a script does.
SCRIPT = """
import atexit, contextlib, os, sys

def threads():
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            names.append(open(f"/proc/self/task/{task}/comm").read().strip())
    return names

def write_threads():
    if "RANK" in os.environ:
        with open(f"{folder}/{creator}-{os.environ['RANK']}", "w") as file:
            file.write(" ".join(threads()))

atexit.register(write_threads)  # registered first: called last

import rayzero, torch
import torch._dynamo  # otherwise imported by every optimizer
from rayzero.engine.comm.process_group import init_distributed
import torch.distributed as dist

folder, *creators_and_ports = sys.argv[1:]
children = []
for creator, port in [text.split("=") for text in creators_and_ports]:
    for rank in range(2):
        children.append(os.fork())
        if not children[-1]:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            break
    else:
        continue
    break
else:
    sys.exit(any([os.waitpid(child, 0)[1] for child in children]))

if creator == "rayzero":
    init_distributed()
elif creator == "script":
    dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = {"type": "SGD", "params": {"lr": 0.1}}
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer}
engine = rayzero.initialize(model=model, config=config)[0]
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
dist.all_reduce(torch.ones(3))
assert "pt_gloo_runloop" in threads()
if creator == "script":
    dist.destroy_process_group()
"""
CREATORS = ("rayzero", "script", "launcher")


@pytest.mark.slow
def test_no_gloo_thread_outlives_the_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ports = [f"{creator}={port}" for creator, port in zip(CREATORS, free_ports(3), strict=True)]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path), *ports],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for creator in CREATORS:
        threads = [(tmp_path / f"{creator}-{rank}").read_text().split() for rank in range(2)]
        assert all("python" in names for names in threads), creator
        assert not any("pt_gloo_runloop" in names for names in threads), creator
