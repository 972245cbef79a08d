"""Measures the node that it runs on: `python -m rayzero.workers.vault.node_probe [SLOWER]`.

The probe is a process of its own, because it may hang or have to be killed. Computing and copying
are measured in CPU time, so that a busy machine does not seem slow. With SLOWER, an injected fault,
they do their work that many times. Each figure is printed when it is known, as a line of JSON; a
string in place of a number is an error.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from tempfile import TemporaryFile, gettempdir
from time import process_time

from rayzero.workers.vault.buffers import available_bytes
from rayzero.workers.vault.nvml import gpu_figures

_GIB = 2**30
_ROUND_CPU_S = 0.05
"""CPU time of a measurement, which is repeated meanwhile; its fastest repetition counts."""
_MATRIX = 384
_COPY_BYTES = 32 * 2**20
_FILE_BYTES = 2**20
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_NICENESS = 15  # as Ray's workers: with a lower priority it would starve on a busy machine


def measure_compute(slower: int) -> dict[str, float]:
    """Returns the GFLOP/s of one core, and whether products of integers were wrong."""
    import numpy as np

    left = (np.arange(_MATRIX**2) % 7).reshape(_MATRIX, _MATRIX)
    right = (np.arange(_MATRIX**2) % 5).reshape(_MATRIX, _MATRIX)
    a, b = left.astype(np.float32), right.astype(np.float32)
    product = np.empty_like(a)

    def multiply() -> None:
        np.matmul(a, b, out=product)

    seconds = _fastest_s(multiply, slower)
    vector = np.arange(_MATRIX)
    is_exact = np.array_equal(product.astype(np.int64) @ vector, left @ (right @ vector))
    return {"compute": 2e-9 * _MATRIX**3 / seconds, "compute_errors": float(not is_exact)}


def measure_memory(slower: int) -> dict[str, float]:
    """Returns the GB/s that one core reads and writes, and whether a copy was wrong."""
    import numpy as np

    source = np.arange(_COPY_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    copy = np.zeros_like(source)
    seconds = _fastest_s(lambda: np.copyto(copy, source), slower)
    is_exact = np.array_equal(source, copy)
    return {"memory": 2e-9 * _COPY_BYTES / seconds, "memory_errors": float(not is_exact)}


def measure_disk(_: int) -> dict[str, float]:
    """Returns the free GiB for temporary files. Raises OSError if none can be written."""
    content = os.urandom(_FILE_BYTES)
    with TemporaryFile(buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())
        file.seek(0)
        if file.read() != content:
            raise OSError("the data read differs from the data written")
    stat = os.statvfs(gettempdir())
    return {"disk": stat.f_bavail * stat.f_frsize / _GIB}


def measure_shared_memory(_: int) -> dict[str, float]:
    """Returns the GiB free for shared memory. Raises OSError if none can be allocated."""
    file = os.memfd_create("rayzero-health", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(file, 0, _FILE_BYTES)
    finally:
        os.close(file)
    return {"shared_memory": available_bytes() / _GIB}


_MEASUREMENTS: dict[str, Callable[[int], dict[str, float]]] = {
    "compute": measure_compute,
    "memory": measure_memory,
    "disk": measure_disk,
    "shared_memory": measure_shared_memory,
    "gpu": lambda _: gpu_figures(),
}


def _fastest_s(work: Callable[[], None], slower: int) -> float:
    """Returns the CPU seconds of the fastest repetition."""
    work()  # touches the memory
    began_s, fastest_s = process_time(), float("inf")
    while process_time() - began_s < _ROUND_CPU_S * slower:
        start_s = process_time()
        for _ in range(slower):
            work()
        fastest_s = min(fastest_s, process_time() - start_s)
    return fastest_s


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the vault
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    for library in ("OMP", "OPENBLAS", "MKL"):  # before numpy is imported
        os.environ[f"{library}_NUM_THREADS"] = "1"
    slower = int(sys.argv[1]) if sys.argv[1:] else 1
    for name, measure in _MEASUREMENTS.items():
        try:
            figures: dict[str, float] | dict[str, str] = measure(slower)
        except (OSError, MemoryError) as error:
            figures = {name: str(error) or "too little memory"}
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
