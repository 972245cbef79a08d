"""Probes torch: two processes run `python -m rayzero.engine.torch_probe RANK FOLDER`.

Each fact is printed as a line of JSON as soon as it is known, so that a later step that hangs or
crashes loses none. The two rendezvous through a file in the folder and run an all-reduce.
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

from rayzero.engine.comm.process_group import connect_collectives
from rayzero.engine.errors import first_line

_INIT_TIMEOUT = timedelta(seconds=30)


def describe_torch() -> dict[str, Any]:
    """Versions and devices, without a process group."""
    cuda = torch.cuda.is_available()
    nccl = dist.is_available() and dist.is_nccl_available()
    return {
        "torch": torch.__version__,
        "built_for_cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if cuda
        else [],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and nccl else None,
        "gloo": dist.is_available() and dist.is_gloo_available(),
    }


def try_backends(rank: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Seconds that rendezvous and an all-reduce take with each backend, or its error.

    NCCL is tried if each of the two processes has its own GPU.
    """
    for backend in ("gloo", "nccl") if torch.cuda.device_count() > 1 else ("gloo",):
        try:
            yield {f"{backend}_s": _try_backend(backend, rank, folder / backend)}
        except (RuntimeError, ValueError, OSError) as error:
            yield {f"{backend}_trouble": first_line(error)}


def _try_backend(backend: str, rank: int, rendezvous: Path) -> float:
    started = time.monotonic()
    os.environ["LOCAL_RANK"] = str(rank)
    url = f"file://{rendezvous}"
    dist.init_process_group(backend, url, _INIT_TIMEOUT, world_size=2, rank=rank)
    try:
        collectives, device = connect_collectives()
        total = torch.full((1024,), float(rank + 1), device=device)
        collectives.all_reduce(total).wait()
        if total.min().item() != 3.0:
            raise ValueError(f"1 + 2 is {total.min().item():g} by {backend}")
    finally:
        dist.destroy_process_group()
    return time.monotonic() - started


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    print(json.dumps(describe_torch()), flush=True)
    for trial in try_backends(rank, folder):
        print(json.dumps(trial), flush=True)


if __name__ == "__main__":
    main()
