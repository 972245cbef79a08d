"""Training functions that need, or must not need, the group while a thread is joining it.

`GATE` holds the join of a rank with a state to load back until that is loaded: a rank that joined
first would never get there.
"""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rayzero.engine.state.training import TrainingState
from rayzero.workers import process_group
from rayzero.workers.messages import Assignment
from tests.workers import recovery_jobs

GATE = threading.Event()
LIMIT_S = 60.0
_join, _load_from = process_group.join_process_group, TrainingState.load_from


def _join_behind_gate(assignment: Assignment, *args: Any) -> dist.ProcessGroup:
    is_gated = assignment.restore is not None and not assignment.survivors_stay
    assert not is_gated or GATE.wait(LIMIT_S), "the state is not loaded before the group is there"
    return _join(assignment, *args)


def _load_and_open_gate(self: TrainingState, *args: Any) -> None:
    _load_from(self, *args)
    GATE.set()


process_group.join_process_group = _join_behind_gate
TrainingState.load_from = _load_and_open_gate  # type: ignore[method-assign]


def train(ctx: Any) -> dict[str, Any]:
    """`recovery_jobs.train`, with a buffer that no state contains: rank 0's value counts. Its first
    call makes a group of its own, so that it does not outlive its generation."""
    make_model = recovery_jobs.make_model

    def make_buffered_model(dtype: torch.dtype) -> torch.nn.Module:
        model = make_model(dtype)
        model.register_buffer("of_rank", torch.full((1,), ctx.rank), persistent=False)
        model.register_forward_pre_hook(check_buffer)
        return model

    if ctx.generation == 1:
        dist.new_group()
    recovery_jobs.make_model = make_buffered_model
    try:
        return recovery_jobs.train(ctx)
    finally:
        recovery_jobs.make_model = make_model


def check_buffer(model: torch.nn.Module, *_: object) -> None:
    assert model.of_rank.tolist() == [0]


def use_when_fenced(ctx: Any, own: socket.socket, peer: socket.socket) -> None:
    folder = Path(ctx.output_dir)
    while not (folder / "fenced").exists():
        time.sleep(0.05)
    own.sendall(b"open")
    (folder / "new").write_bytes(peer.recv(4))
    (folder / "new").rename(folder / f"kept-{ctx.rank}")


def use_group_in_build(ctx: Any) -> dict[str, Any]:
    """In generation 1 the constructor asks for the group; in generation 2 it fails."""
    if ctx.generation == 1:
        with socket.create_server(("127.0.0.1", 0)) as server:
            own = socket.create_connection(server.getsockname()[:2])
            peer, _ = server.accept()
        threading.Thread(target=use_when_fenced, args=(ctx, own, peer), daemon=True).start()
        print("asks for the group")
        dist.barrier()
    if ctx.generation == 2:
        raise ValueError("in the constructor")
    assert dist.get_world_size() == ctx.world_size
    return recovery_jobs.train(ctx)
