"""Training functions that need, or must not need, the group while a thread is joining it.

In generation n the function does what `PLAN[n]` says. `GATE` holds the join back until the state is
loaded, where the plan says so: a rank that joined first would never get there.
"""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rayzero.engine.state.training import TrainingState
from rayzero.workers import process_group
from tests.workers import recovery_jobs

GATE = threading.Event()
GATE.set()
LIMIT_S = 60.0
_join, _load_from = process_group.join_process_group, TrainingState.load_from


def _join_behind_gate(*args: Any) -> dist.ProcessGroup:
    assert GATE.wait(LIMIT_S), "the state is not loaded before the group is there"
    return _join(*args)


def _load_and_open_gate(self: TrainingState, *args: Any) -> None:
    _load_from(self, *args)
    GATE.set()


process_group.join_process_group = _join_behind_gate
TrainingState.load_from = _load_and_open_gate  # type: ignore[method-assign]


def train(ctx: Any) -> dict[str, Any]:
    """`recovery_jobs.train`, with a buffer that no state contains: rank 0's value counts. From
    generation 2 on, the join waits until the state is loaded."""
    make_model = recovery_jobs.make_model

    def make_buffered_model(dtype: torch.dtype) -> torch.nn.Module:
        model = make_model(dtype)
        model.register_buffer("of_rank", torch.full((1,), ctx.rank), persistent=False)
        model.register_forward_pre_hook(check_buffer)
        return model

    recovery_jobs.make_model = make_buffered_model
    try:
        return recovery_jobs.train(ctx)
    finally:
        recovery_jobs.make_model = make_model
        GATE.clear()


def check_buffer(model: torch.nn.Module, *_: object) -> None:
    assert model.of_rank.tolist() == [0]


def use_group_in_build(ctx: Any) -> dict[str, Any]:
    """In generation 1 the constructor asks for the group; in generation 2 it fails."""
    joins = [thread for thread in threading.enumerate() if thread.name == "rayzero-join"]
    assert len(joins) <= 1, "the last generation's join has ended"
    if ctx.generation == 1:
        with socket.create_server(("127.0.0.1", 0)) as server:
            own = socket.create_connection(server.getsockname()[:2])
            peer, _ = server.accept()
            try:
                print("asks for the group")
                dist.barrier()
            finally:
                own.sendall(b"open")
                Path(ctx.output_dir, f"kept-{ctx.rank}").write_bytes(peer.recv(4))
                own.close()
                peer.close()
    if ctx.generation == 2:
        raise ValueError("in the constructor")
    assert dist.get_world_size() == ctx.world_size
    return recovery_jobs.train(ctx)
