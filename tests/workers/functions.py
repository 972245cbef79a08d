"""Training functions and other objects that an entry point may name."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist


def returns(ctx: Any) -> dict[str, Any]:
    print("line one\nline", "two", end="")
    ctx.report(tokens=3)
    ctx.report(step=1, loss=torch.tensor(2.0))
    ctx.report(tokens=4)
    return {"world": dist.get_world_size(), "score": torch.tensor(0.5)}


def raises(ctx: Any) -> None:
    ctx.report(step=1)
    print("half a line", end="")
    raise ValueError("boom")


def endless(ctx: Any) -> None:
    step = 0
    while True:
        step += 1
        try:
            ctx.report(step=step)
        except BaseException:
            print("caught")
            raise
        time.sleep(0.005)


def cleans_up(ctx: Any) -> None:
    try:
        endless(ctx)
    finally:
        print("cleaned up")


def returns_a_list(ctx: Any) -> list[int]:
    return [1]


def returns_non_json(ctx: Any) -> dict[str, Any]:
    return {"model": object()}


def returns_a_vector(ctx: Any) -> dict[str, Any]:
    return {"weights": torch.ones(2)}  # its `item()` raises RuntimeError


def returns_deep(ctx: Any) -> dict[str, Any]:
    value: Any = 1
    for _ in range(100_000):
        value = [value]
    return {"value": value}


def returns_much(ctx: Any) -> dict[str, Any]:
    return {"losses": [0.125] * 200_000}


class Holder:
    @staticmethod
    def train(ctx: Any) -> None:
        del ctx


number = 3


def forks(ctx: Any) -> dict[str, Any]:
    """Two children return and raise as this function does; the exit codes of both."""
    codes = []
    for fails in (False, True):
        child = os.fork()
        if child == 0:
            if fails:
                raise ValueError("in the child")
            return {"of": "the child"}
        for _ in range(600):
            if (ended := os.waitpid(child, os.WNOHANG)) != (0, 0):
                break
            time.sleep(0.05)
        else:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
        codes.append(os.waitstatus_to_exitcode(ended[1]))
    return {"codes": codes}
