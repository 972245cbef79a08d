"""`initialize` as DeepSpeed's scripts know it: afterwards there is a process group."""

from __future__ import annotations

from functools import wraps
from typing import Any

from rayzero.engine.api.initialize import initialize as rayzero_initialize
from rayzero.engine.comm.process_group import init_distributed


@wraps(rayzero_initialize)
def initialize(*arguments: Any, **options: Any) -> Any:
    """`rayzero.initialize`; a script that runs alone gets a group of one rank, because what follows
    may ask torch.distributed for its rank."""
    init_distributed(
        distributed_port=options.get("distributed_port", 29500),
        dist_init_required=options.get("dist_init_required"),
    )
    return rayzero_initialize(*arguments, **options)
