"""Small messages between ranks, and work that either succeeds on all of them or fails on all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.errors import EngineError


def everyones(collectives: Collectives, message: bytes, device: torch.device) -> list[bytes]:
    """Each rank's message, on every rank. Collective.

    Args:
        device: where the group's backend can read from.
    """
    ranks = range(collectives.world_size)
    if len(ranks) == 1:
        return [message]
    lengths = torch.zeros(len(ranks), dtype=torch.float64, device=device)
    lengths[collectives.rank] = len(message)
    collectives.vote(lengths)
    found = []
    for rank, length in zip(ranks, lengths.tolist(), strict=True):
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if rank == collectives.rank and message:
            buffer.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        buffer = buffer.to(device)
        if length:
            collectives.broadcast(buffer, rank)
        found.append(buffer.cpu().numpy().tobytes())
    return found


def together(collectives: Collectives, device: torch.device, work: Callable[[], Any]) -> list[Any]:
    """Runs `work` on every rank; what each returned, by rank. Collective.

    If it fails on one rank it fails on all of them, so that none waits for another in vain.

    Args:
        work: returns what JSON can hold. No collectives in it.

    Raises:
        Whatever `work` raised here; EngineError with the first failure's text elsewhere.
    """
    failure: Exception | None = None
    result = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  raised below, after the others have heard of it
        failure = error
    told = {"result": result} if failure is None else {"error": str(failure)}
    answers = [json.loads(one) for one in everyones(collectives, json.dumps(told).encode(), device)]
    if failure is not None:
        raise failure
    for rank, answer in enumerate(answers):
        if "error" in answer:
            raise EngineError(f"rank {rank} failed: {answer['error']}")
    return [answer["result"] for answer in answers]
