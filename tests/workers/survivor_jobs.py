"""A training function that notes how often each process has entered it, and which objects it has
before and after each change of its ranks."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import rayzero.data
from rayzero.engine.data.sampling import SampleOrder
from rayzero.engine.data.streams.readers import IterableStream
from tests.workers.recovery_jobs import LENGTH, Data, engine_config, make_model

NOTES = "notes.jsonl"
_entries = 0


def compiled_config(stage: int) -> dict[str, Any]:
    """Only a new model is compiled again: micro-batches differ with the number of ranks."""
    return engine_config(stage) | {"compile": {"enabled": True, "backend": "eager"}}


class OrderedRows:
    """One reader's samples of `Data`: each position of the readers has the sample of that position
    of the dataset."""

    def __init__(self, reader: int, readers: int, seed: int) -> None:
        self._order = SampleOrder(LENGTH, seed)
        self._data = Data()
        self._position = reader
        self._readers = readers

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]

    def __iter__(self) -> Iterator[Any]:
        while True:
            (index,) = self._order.indices(self._position, 1).tolist()
            self._position += self._readers
            yield self._data[index]


def iterable_data(seed: int) -> IterableStream:
    """5 readers: at most sizes, two ranks run one of them."""
    make = partial(OrderedRows, seed=seed)
    return rayzero.data.iterable(make, readers=5, snapshot_every=3, read_ahead=4)


def train(ctx: Any) -> None:
    """args: `gates`, the steps before which each rank waits until it is let go; `counts`, those
    before which live objects of Python are counted; no other garbage is collected then; `iterable`:
    the data is `iterable_data`."""
    global _entries
    _entries += 1
    if "counts" in ctx.args:
        gc.disable()
    note(ctx, {"pid": os.getpid(), "entries": _entries})
    model = make_model(torch.float64)
    data = iterable_data(ctx.seed) if "iterable" in ctx.args else Data()
    engine, optimizer, loader, _ = ctx.initialize(model=model, training_data=data)
    engine.on_reconfigure(lambda it: note(ctx, objects(it, model, optimizer)))
    for x, y in loader.until(ctx.steps):
        step = engine.progress.step + 1
        await_gate(ctx, step)
        if step in ctx.args.get("counts", ()):
            note(ctx, count_objects())
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
    weights = engine.state_dict()
    note(ctx, objects(engine, model, optimizer))
    if ctx.is_main:
        torch.save(weights, ctx.output_dir / "weights.pt")


def note(ctx: Any, values: dict[str, Any]) -> None:
    """By one system call: the process may be killed after it."""
    with (ctx.output_dir / NOTES).open("ab", buffering=0) as file:
        file.write(json.dumps(values).encode() + b"\n")


def objects(engine: Any, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    kept = {
        "model": [engine.module, model],
        "params": [*model.parameters()],
        "optimizer": [engine.optimizer, optimizer, optimizer.param_groups],
        "code": [module._compiled_call_impl for module in model.modules()],
    }
    return {
        "pid": os.getpid(),
        "entries": _entries,
        "graphs": counters["stats"]["unique_graphs"],
        **{name: [id(one) for one in them] for name, them in kept.items()},
    }


def count_objects() -> dict[str, Any]:
    gc.collect()
    return {"pid": os.getpid(), "live": len(gc.get_objects())}


def await_gate(ctx: Any, step: int) -> None:
    if step not in ctx.args["gates"]:
        return
    arrived, opened = gate_files(ctx.output_dir, step)
    arrived.with_name(f"{arrived.name}-{os.getpid()}").touch()
    while not opened.exists():
        time.sleep(0.002)


def gate_files(folder: Path, step: int) -> tuple[Path, Path]:
    return folder / f"arrived-{step}", folder / f"opened-{step}"
