"""Probes torch: two processes run `python -m rayzero.engine.torch_probe RANK FOLDER SECONDS`.

Each fact is printed as a line of JSON as soon as it is known, so that a later step that hangs or
crashes loses none. The two processes rendezvous through a file in FOLDER and run an all-reduce;
each waits at most SECONDS for the other.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rayzero.engine.comm.process_group import connect_collectives, create_group
from rayzero.engine.device import device_count, get_device, nccl_version
from rayzero.engine.errors import first_line


def describe_torch() -> dict[str, Any]:
    """Returns versions and devices, without a process group."""
    devices = [torch.device("cuda", index) for index in range(device_count())]
    return {
        "torch": torch.__version__,
        "built_for_cuda": torch.version.cuda,
        "devices": [get_device(device).name for device in devices],
        "nccl": nccl_version(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
    }


def try_backends(rank: int, folder: Path, timeout: timedelta) -> Iterator[dict[str, Any]]:
    """Yields the seconds that rendezvous and an all-reduce take with each backend, or its error.

    NCCL is tried if each of the two processes has its own GPU.
    """
    for backend in ("gloo", "nccl") if device_count() > 1 else ("gloo",):
        try:
            yield {f"{backend}_s": _try_backend(backend, rank, folder / backend, timeout)}
        except (RuntimeError, ValueError, OSError) as error:
            yield {f"{backend}_trouble": first_line(error)}


def _try_backend(backend: str, rank: int, rendezvous: Path, timeout: timedelta) -> float:
    started = time.monotonic()
    os.environ["LOCAL_RANK"] = str(rank)
    url = f"file://{rendezvous}"
    create_group(backend, init_method=url, timeout=timeout, world_size=2, rank=rank)
    try:
        collectives = connect_collectives()
        total = torch.full((1024,), float(rank + 1), device=collectives.device)
        collectives.all_reduce(total).wait()
        (lowest,) = get_device(collectives.device).read(total.min())
        if lowest != 3.0:
            raise ValueError(f"1 + 2 is {lowest:g} by {backend}")
    finally:
        dist.destroy_process_group()
    return time.monotonic() - started


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    print(json.dumps(describe_torch()), flush=True)
    for trial in try_backends(rank, folder, timedelta(seconds=float(sys.argv[3]))):
        print(json.dumps(trial), flush=True)


if __name__ == "__main__":
    main()
