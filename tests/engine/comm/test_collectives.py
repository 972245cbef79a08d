"""Collectives equal plain sums; errors of failed collectives."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rayzero.engine import device as device_module
from rayzero.engine.comm import process_group as connecting
from rayzero.engine.comm.backend import rank_chunk
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.comm.gloo import GlooBackend
from rayzero.engine.comm.process_group import (
    SingleRankBackend,
    connect_collectives,
    init_distributed,
)
from rayzero.engine.comm.shared_memory import ShmSegments
from rayzero.engine.device import CudaDevice
from rayzero.engine.errors import CollectiveError, ConfigError
from tests.engine.comm.gloo_ranks import connect_gloo, group, with_and_without_sharing
from tests.support.ranks import RankError, run_ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
PART = 96  # elements of one rank's part


def values(rank: int, world: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Small integers, whose sums are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(-9, 9, (world * PART,), generator=generator).to(dtype)


def total(world: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.stack([values(rank, world, dtype, seed) for rank in range(world)]).sum(0)


def buffer(collectives: Collectives, value: Tensor) -> Tensor:
    return collectives.zeros(value.numel(), value.dtype).copy_(value)


def run_collectives(rank: int, world: int, share: bool) -> dict[str, dict[str, int]]:
    collectives = connect_gloo(share)
    began_s = time.perf_counter()
    assert (collectives.rank, collectives.world_size) == (rank, world)
    for dtype in DTYPES:
        summed = total(world, dtype)
        chunk = rank_chunk(summed, rank, world)

        full = buffer(collectives, values(rank, world, dtype))
        collectives.all_reduce(full).wait()
        assert torch.equal(full, summed)

        for accumulate in (False, True):
            full = buffer(collectives, values(rank, world, dtype))
            out = torch.full((PART,), 7, dtype=dtype)
            collectives.reduce_scatter(full, out, accumulate=accumulate).wait()
            assert torch.equal(out, chunk + 7 * accumulate)

        full = buffer(collectives, values(rank, world, dtype))
        collectives.reduce_scatter(full, rank_chunk(full, rank, world)).wait()
        assert torch.equal(rank_chunk(full, rank, world), chunk)

        full = buffer(collectives, torch.full((world * PART,), -1, dtype=dtype))
        rank_chunk(full, rank, world).copy_(chunk)
        collectives.all_gather(full, rank_chunk(full, rank, world)).wait()
        assert torch.equal(full, summed)

        # Only memory that peers read must be shared.
        full = torch.full((world * PART,), -1, dtype=dtype)
        collectives.all_gather(full, buffer(collectives, chunk)).wait()
        assert torch.equal(full, summed)

        for target in range(world):
            full = torch.zeros(world * PART if rank == target else 0, dtype=dtype)
            collectives.gather(full, chunk, target).wait()
            assert rank != target or torch.equal(full, summed)

        # Rank s sends rank r zero or more elements of value 10 s + r.
        sent = [torch.full(((3 * rank + r) % 5,), 10 * rank + r, dtype=dtype) for r in range(world)]
        received = [torch.zeros((3 * s + rank) % 5, dtype=dtype) for s in range(world)]
        collectives.all_to_all_v(received, sent).release()
        for s in range(world):
            assert received[s].tolist() == [10 * s + rank] * ((3 * s + rank) % 5)

        source = world - 1
        full = values(rank, world, dtype)
        collectives.broadcast(full, source)
        assert torch.equal(full, values(source, world, dtype))

    scalars = torch.tensor([rank], dtype=torch.float64)
    assert collectives.sum_scalars(scalars, [2.0]) == [world * (world - 1) / 2, 2 * world]
    assert 0 < collectives.counters.exposed_s < time.perf_counter() - began_s
    assert collectives.counters.sequence == len(DTYPES) * (8 + world) + 1
    return {name: vars(traffic) for name, traffic in collectives.counters.by_name.items()}


@with_and_without_sharing
@pytest.mark.parametrize("world", [2, 3, 4])
def test_results_and_traffic_counters(world: int, share: bool) -> None:
    full = sum(world * PART * dtype.itemsize for dtype in DTYPES)
    once = len(DTYPES)
    for counters in run_ranks(world, run_collectives, share):
        assert counters.pop("exchange")["calls"] == once
        assert counters == {
            "all_reduce": {"calls": once, "bytes": 2 * full},
            "reduce_scatter": {"calls": 3 * once, "bytes": 3 * full},
            "all_gather": {"calls": 2 * once, "bytes": 2 * full},
            "gather": {"calls": world * once, "bytes": world * full},
            "broadcast": {"calls": once, "bytes": full},
            "vote": {"calls": 1, "bytes": 24},
        }


def many_in_flight(rank: int, world: int, share: bool) -> int:
    """Start twelve collectives of three kinds; wait in a different order on every rank."""
    collectives = connect_gloo(share)
    shuffled = random.Random(rank)
    for _ in range(3):
        pending, expected = [], []
        for seed in range(12):
            full = buffer(collectives, values(rank, world, torch.float64, seed))
            part = torch.zeros(PART, dtype=torch.float64)
            if seed % 3 == 0:
                pending.append((collectives.reduce_scatter(full, part), part))
                expected.append(rank_chunk(total(world, torch.float64, seed), rank, world))
            elif seed % 3 == 1:
                pending.append((collectives.all_gather(full, rank_chunk(full, rank, world)), full))
                terms = [values(peer, world, torch.float64, seed) for peer in range(world)]
                expected.append(torch.cat([rank_chunk(t, r, world) for r, t in enumerate(terms)]))
            else:
                pending.append((collectives.all_reduce(full), full))
                expected.append(total(world, torch.float64, seed))
        order = list(range(len(pending)))
        shuffled.shuffle(order)
        for number in order:
            pending[number][0].wait()
            pending[number][0].wait()  # a second wait has no effect
        for (_, result), value in zip(pending, expected, strict=True):
            assert torch.equal(result, value)
        collectives.sum_scalars(torch.zeros(1))  # afterwards gathered parts may be freed
    return collectives.staging_bytes


@with_and_without_sharing
@pytest.mark.parametrize("world", [2, 4])
def test_concurrent_collectives(world: int, share: bool) -> None:
    # Four reduce-scatters are in flight at once; later rounds reuse their buffers.
    expected = 0 if share else 4 * (world - 1) * PART * 8
    assert run_ranks(world, many_in_flight, share) == [expected] * world


def reduce_with_delays(rank: int, world: int) -> list[Tensor]:
    """Sum values that depend on the order of addition; delay each rank in turn."""
    results = []
    for share in (False, True):
        collectives = connect_gloo(share)
        for delayed_rank in range(world):
            torch.manual_seed(rank)
            full = buffer(
                collectives, torch.randn(world * PART) * 10.0 ** torch.randint(-6, 6, (1,))
            )
            in_place = buffer(collectives, full)
            if rank == delayed_rank:
                time.sleep(0.05)
            out = torch.empty(PART)
            collectives.reduce_scatter(full, out).wait()
            collectives.reduce_scatter(in_place, rank_chunk(in_place, rank, world)).wait()
            results += [out, rank_chunk(in_place, rank, world).clone()]
    return results


def test_sums_do_not_depend_on_timing() -> None:
    for results in run_ranks(4, reduce_with_delays):
        assert all(torch.equal(result, results[0]) for result in results)


def broadcast_all_dtypes(rank: int, world: int) -> list[bool]:
    """Dtypes that a backend may lack: gloo and NCCL have no int16 and no complex numbers."""
    collectives = connect_gloo(share=False)
    equal = []
    for dtype in (torch.int16, torch.complex64, torch.bool, torch.float8_e4m3fn, torch.bfloat16):
        for shape in ((), (3, 5)):
            expected = torch.full(shape, 1, dtype=dtype)
            tensor = expected.clone() if rank == 1 else torch.zeros(shape, dtype=dtype)
            collectives.broadcast(tensor, source=1)
            equal.append(
                torch.equal(tensor.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))
            )
    return equal


def test_broadcast_has_every_dtype() -> None:
    assert run_ranks(2, broadcast_all_dtypes) == [[True] * 10] * 2


class BrokenBackend(SingleRankBackend):
    """Two ranks, of which the peer has exited."""

    world_size = 2

    class _BrokenWork:
        def wait(self) -> None:
            raise RuntimeError("peer exited")

    def all_gather(self, full: Tensor, part: Tensor) -> Any:
        return self._BrokenWork()

    def broadcast(self, tensor: Tensor, source: int) -> Any:
        raise RuntimeError("peer exited")


def test_error_names_the_failed_collective() -> None:
    collectives = Collectives(BrokenBackend())
    first = collectives.all_gather(torch.zeros(2), torch.zeros(1))
    collectives.all_gather(torch.zeros(2), torch.zeros(1))
    with pytest.raises(
        CollectiveError, match=r"all_gather .* rank 0 of 2 \(collective 1\): peer exited"
    ):
        first.wait()
    with pytest.raises(CollectiveError, match=r"broadcast .* \(collective 3\): peer exited"):
        collectives.broadcast(torch.zeros(2))


class TestConnect:
    @pytest.mark.parametrize("given", [{}, {"RANK": "1", "WORLD_SIZE": "2"}])
    def test_without_group_uses_single_rank(
        self, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
    ) -> None:
        """Also with an incomplete environment of torchrun's."""
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        collectives = connect_collectives()
        device = collectives.device
        assert isinstance(collectives._backend, SingleRankBackend)
        assert device == torch.device("cuda" if torch.cuda.is_available() else "cpu", device.index)
        assert not dist.is_initialized()

    def test_nccl_group_is_bound_to_the_local_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """LOCAL_RANK's of the visible devices, which is current before the group is made."""
        calls: list[Any] = []
        monkeypatch.setattr(device_module, "device_count", lambda: 2)
        monkeypatch.setattr(
            CudaDevice, "make_current", lambda self: calls.append(self.torch_device)
        )
        monkeypatch.setattr(
            connecting.dist,
            "init_process_group",
            lambda *args, **named: calls.append((args, named)),
        )
        monkeypatch.setattr(connecting, "destroy_at_exit", lambda: None)
        for name, value in {
            "RANK": 3,
            "WORLD_SIZE": 4,
            "MASTER_ADDR": "a",
            "LOCAL_RANK": 3,
        }.items():
            monkeypatch.setenv(name, str(value))
        expected = torch.device("cuda", 1)
        connect_collectives()
        assert calls[:2] == [expected, (("nccl",), {"device_id": expected})]
        calls.clear()
        init_distributed(verbose=False)
        assert calls[0] == expected
        assert calls[1][1]["device_id"] == expected

    def test_device_of_the_group_takes_precedence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A worker has bound the group to its device; LOCAL_RANK counts the node's ranks."""
        monkeypatch.setenv("LOCAL_RANK", "3")
        monkeypatch.setattr(device_module, "device_count", lambda: 8)
        monkeypatch.setattr(CudaDevice, "make_current", lambda self: None)
        monkeypatch.setattr(connecting.dist, "get_backend_config", lambda group: "cuda:nccl")
        with group("gloo"):
            assert connect_collectives().device == torch.device("cuda", 3)
            dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
            assert connect_collectives().device == torch.device("cuda", 0)

    @pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", None])
    def test_group_of_one_rank_uses_single_rank(self, backend: str | None) -> None:
        with group(backend):
            collectives = connect_collectives()
            assert isinstance(collectives._backend, SingleRankBackend)
            assert torch.cuda.is_available() or collectives.device.type == "cpu"

    def test_other_backends_are_rejected(self) -> None:
        with group("fake"), pytest.raises(ConfigError, match=r"(?s)'.*fake.*'.*nccl, gloo"):
            connect_collectives()


def unnamed_backend(rank: int, world: int) -> bool:
    """A group created without naming a backend has gloo for CPU tensors."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()  # all ranks have joined the group
    dist.destroy_process_group()
    new_store = dist.PrefixStore("new", store)
    dist.init_process_group(store=new_store, rank=rank, world_size=world)
    collectives = connect_collectives()
    full = collectives.zeros(world * 4, torch.float32).fill_(1)
    collectives.all_reduce(full).wait()
    return isinstance(collectives._backend, GlooBackend) and full.tolist() == [world] * (4 * world)


@pytest.mark.skipif(torch.cuda.is_available(), reason="uses NCCL")
def test_group_without_named_backend_uses_gloo() -> None:
    assert run_ranks(2, unnamed_backend) == [True, True]


def lose_peer(rank: int, world: int, share: bool) -> None:
    collectives = connect_gloo(share)
    full, out = buffer(collectives, torch.zeros(world * 1_000_000)), torch.zeros(1_000_000)
    collectives.broadcast(full)  # connects all ranks
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start, messages = time.monotonic(), []
    for call in (
        lambda: collectives.all_gather(full, rank_chunk(full, rank, world)).wait(),
        lambda: collectives.reduce_scatter(full, out).wait(),
        lambda: collectives.all_reduce(full).wait(),
        lambda: collectives.sum_scalars(torch.zeros(1)),
        lambda: collectives.broadcast(full, source=1),
    ):
        with pytest.raises(CollectiveError) as caught:
            call()
        messages.append(caught.value.seen)
    # Rank 1 has exited, so the messages reach the test in a RankError.
    quick = "at once" if time.monotonic() - start < 5 else "late"
    raise RuntimeError(f"{quick}: {messages}")


@with_and_without_sharing
def test_killed_peer_error_names_the_collective(share: bool) -> None:
    with pytest.raises(RankError, match="rank 1: the process died") as caught:
        run_ranks(2, lose_peer, share)
    text = str(caught.value)
    assert "RuntimeError: at once" in text
    names = ["all_gather", "reduce_scatter", "all_reduce", "vote", "broadcast"]
    for number, name in enumerate(names, start=2):
        assert f"{name} failed on rank 0 of 2 (collective {number})" in text


def test_peer_that_has_ended_before_its_memory_was_mapped_is_a_failed_collective() -> None:
    """Its token may arrive first: the reader opens its memory by the process id only then."""
    peer = subprocess.Popen(["true"])
    peer.wait()
    segments = ShmSegments([os.getpid(), peer.pid])
    collectives = Collectives(SimpleNamespace(rank=0, world_size=2))  # type: ignore[arg-type]
    like = torch.zeros(4)
    with pytest.raises(CollectiveError, match="memory of rank 1 cannot be read: No such file"):
        collectives.run_timed("a", 1, lambda: segments.view(1, (17, 0), like), lambda: like)
