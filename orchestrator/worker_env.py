"""Which environment variables a job file may set for its workers' processes: `workers.env`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rayzero.workers.nccl_settings import contradictions

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_GENERATION = "each generation sets it"
_RESERVED = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), _GENERATION),
    **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), _GENERATION),
    "OMP_NUM_THREADS": "workers.cpus sets it",
    "CUDA_VISIBLE_DEVICES": "Ray sets it to the worker's own GPU, by workers.gpus",
}


def check_worker_env(env: Mapping[str, str]) -> None:
    """Raises ValueError for a name or value that no process can have, a variable that is set by
    others, or one that contradicts a setting without which no fault can be repaired."""
    for name, value in env.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r:.100} is not the name of an environment variable")
        if "\0" in value:
            raise ValueError(f"the value of {name} must not contain a NUL character")
        if name in _RESERVED:
            raise ValueError(f"must not set {name}: {_RESERVED[name]}")
        if name.startswith("RAY_"):
            raise ValueError(f"must not set {name}: Ray reads it before a worker starts")
    for setting, seen in contradictions(env):
        if setting.required:
            raise ValueError(f"must not set {seen}: {setting.otherwise}")
