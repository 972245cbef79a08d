"""Available memory of simulated machines, and allocation if memory is insufficient."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from time import monotonic

import psutil
import pytest

from rayzero.engine.errors import RayzeroError
from rayzero.workers.vault.buffers import BufferPool, available_bytes, resident_bytes
from rayzero.workers.vault.records import VaultMemoryError
from tests.workers.vault.support import open_fds

MIB = 2**20
V2 = "0::/pod/box\n"
V1 = "9:name=systemd:/x\n4:cpu,memory:/pod/box\n0::/x\n"


def machine(root: Path, cgroup: str, files: Mapping[str, str]) -> Path:
    """A root folder of a machine with 1000 KiB available and these control group files."""
    meminfo = "MemTotal: 4000 kB\nMemFree: 10 kB\nMemAvailable:   1000 kB\n"
    everything = {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup}
    for path, text in (everything | {f"sys/fs/cgroup/{k}": v for k, v in files.items()}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        (V2, {}, 1_024_000),
        (V2, {"pod/box/memory.max": "max\n", "pod/box/memory.current": "5"}, 1_024_000),
        (V2, {"pod/box/memory.max": "900\n", "pod/box/memory.current": "300\n"}, 600),
        (V2, {"pod/memory.max": "800", "pod/memory.current": "300"}, 500),
        (V2, {"pod/memory.max": "800", "pod/memory.current": "900"}, 0),
        (
            V2,
            {
                "pod/box/memory.max": "900",
                "pod/box/memory.current": "300",
                "pod/box/memory.stat": "anon 7\ninactive_file 100\nfile 9\n",
            },
            700,
        ),
        # In a container the group may be mounted at the root, under a path that does not exist.
        (V2, {"memory.max": "900", "memory.current": "300"}, 600),
        ("0::/../../box\n", {"memory.max": "900", "memory.current": "300"}, 600),
        (
            V1,
            {
                "memory/pod/box/memory.limit_in_bytes": "900",
                "memory/pod/box/memory.usage_in_bytes": "300",
                "memory/pod/box/memory.stat": "total_inactive_file 50\ninactive_file 9\n",
            },
            650,
        ),
        (V1, {"memory/memory.limit_in_bytes": "9223372036854771712"}, 1_024_000),
    ],
)
def test_smallest_limit_applies(cgroup: str, files: dict[str, str], expected: int, tmp_path: Path):
    assert available_bytes(machine(tmp_path, cgroup, files)) == expected


def test_kernel_without_memavailable_is_error(tmp_path: Path):
    root = machine(tmp_path, V2, {})
    (root / "proc/meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(RayzeroError, match="MemAvailable"):
        available_bytes(root)


def test_memory_of_this_machine():
    expected = psutil.Process().memory_info().rss
    assert abs(resident_bytes() - expected) < 0.2 * expected
    assert available_bytes() > 0


def test_insufficient_memory_error_names_sizes_and_settings():
    before = open_fds()
    pool = BufferPool(lambda: 5 * MIB)
    with pytest.raises(VaultMemoryError) as caught:
        pool.acquire(6 * MIB)
    error = pickle.loads(pickle.dumps(caught.value))
    assert "6 MiB" in str(error)
    assert "5 MiB" in str(error)
    for setting in ("recovery.replicas", "checkpoint.every_steps", "memory limit"):
        assert setting in str(error)
    assert open_fds() == before
    buffer = pool.acquire(2 * MIB)
    assert os.fstat(buffer.fd).st_blocks * 512 >= 2 * MIB  # touched already
    pool.release([buffer])
    pool.trim()
    assert open_fds() == before


def test_allocation_failure_is_reported(monkeypatch: pytest.MonkeyPatch):
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    before = open_fds()
    pool = BufferPool(lambda: 100 * MIB)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(VaultMemoryError):
        pool.acquire(MIB)
    assert (open_fds(), pool.nbytes) == (before, 0)


def test_spare_buffers_are_used_first_and_only_growth_counts():
    available = 100 * MIB
    pool = BufferPool(lambda: available)
    small, large = pool.acquire(MIB), pool.acquire(4 * MIB)
    pool.release([small, large])
    assert pool.nbytes == 5 * MIB
    available = 2 * MIB
    first = pool.acquire(2 * MIB)
    assert first is large  # it need not grow
    second = pool.acquire(3 * MIB)
    assert second is small
    assert second.capacity_bytes == os.fstat(second.fd).st_size == 3 * MIB
    pool.release([first, second])
    pool.trim()


def test_spare_buffers_are_freed_before_memory_is_refused():
    free_bytes = [3 * MIB, 8 * MIB]  # before and after the spare buffers are freed
    pool = BufferPool(lambda: free_bytes[0] if pool.nbytes else free_bytes[1])
    free_bytes[0], free_bytes[1] = 8 * MIB, 8 * MIB
    pool.release([pool.acquire(MIB) for _ in range(5)])
    free_bytes[0] = 3 * MIB
    buffer = pool.acquire(8 * MIB)
    assert pool.nbytes == 0
    pool.release([buffer])
    pool.trim()


def test_mapped_buffer_cannot_be_truncated():
    pool = BufferPool(lambda: MIB)
    buffer = pool.acquire(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(buffer.fd, 0)
    pool.release([buffer])
    pool.trim()


def test_buffers_are_allocated_at_once_and_not_from_the_same_memory(
    monkeypatch: pytest.MonkeyPatch,
):
    """Ranks of one node do not wait for each other's pages to be zeroed."""
    both, allocate = Barrier(2), os.posix_fallocate

    def allocate_beside(fd: int, offset: int, length: int) -> None:
        both.wait(10)  # fails unless another allocation is running
        allocate(fd, offset, length)

    pool = BufferPool(lambda: 10 * MIB)
    with ThreadPoolExecutor(2) as threads:
        monkeypatch.setattr(os, "posix_fallocate", allocate_beside)
        started = [threads.submit(pool.acquire, 4 * MIB)]
        deadline = monotonic() + 10
        while both.n_waiting == 0 and monotonic() < deadline:
            pass
        with pytest.raises(VaultMemoryError, match="the 6 MiB that are available"):
            pool.acquire(7 * MIB)  # 4 of the 10 are promised
        started.append(threads.submit(pool.acquire, 5 * MIB))
        buffers = [future.result(10) for future in started]
    assert [buffer.allocated_bytes for buffer in buffers] == [4 * MIB, 5 * MIB]
    pool.release(buffers)
    pool.trim()
