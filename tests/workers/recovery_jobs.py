"""A training function and its plain-torch oracle, for recovery tests."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import rayzero
from rayzero.engine.comm.collectives import CollectiveWork
from rayzero.engine.comm.shared_memory import SharedMemoryBackend
from rayzero.engine.zero.file_values import FileValues

SAMPLES, LENGTH = 12, 50


class Data:
    """Regression samples; each is a pure function of its index."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self._dtype = dtype

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=generator, dtype=torch.float64).to(self._dtype)
        return x, x.sum().reshape(1).sin()


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(
        nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 1)
    )
    return blocks.to(dtype)


def make_ema(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))


class OwnState:
    """A function's own state, by the rule of docs/jobs.md: the sum of the numbers of all finished
    steps, and the mean of the weights. What `set` gets is appended to `carried-RANK`, with the
    generation; `check` leaves the mean in `ema-RANK.pt`."""

    def __init__(self, ctx: Any, model: nn.Module) -> None:
        self.engine: Any = None
        self._ctx, self._model = ctx, model
        self._step, self._total = 0, torch.zeros((), dtype=torch.int64)
        self._ema = make_ema(model) if ctx.engine_config["zero_optimization"]["stage"] < 3 else None
        ctx.state("total", self._get, self._set)

    def follow(self) -> None:
        if self.engine.global_steps > self._step:
            self._step = self.engine.global_steps
            self._total += self._step
            if self._ema is not None:
                self._ema.update_parameters(self._model)

    def _get(self) -> dict[str, Any]:
        self.follow()
        ema = None if self._ema is None else self._ema.state_dict()
        return {"rank": self._ctx.rank, "step": self._step, "total": self._total, "ema": ema}

    def _set(self, value: dict[str, Any]) -> None:
        self._step, self._total = value["step"], value["total"]
        if self._ema is not None:
            self._ema.load_state_dict(value["ema"])
        carried = [self._ctx.generation, value["rank"], self._step, int(self._total)]
        with (self._ctx.output_dir / f"carried-{self._ctx.rank}").open("a") as file:
            file.write(json.dumps(carried) + "\n")

    def check(self) -> None:
        assert int(self._total) == sum(range(self.engine.global_steps + 1)), self._total
        if self._ema is not None:
            path = self._ctx.output_dir / f"ema-{self._ctx.rank}.pt"
            torch.save(self._ema.module.state_dict(), path)


def train(ctx: Any) -> dict[str, Any]:
    dtype = getattr(torch, ctx.args.get("dtype", "float64"))
    model = make_model(dtype)
    own = OwnState(ctx, model)
    engine, _, loader, _ = ctx.initialize(model=model, training_data=Data(dtype))
    return _finish(ctx, engine, loader, own)


def _finish(ctx: Any, engine: Any, loader: Any, own: OwnState) -> dict[str, Any]:
    own.engine = engine
    for x, y in loader.steps(ctx.steps - engine.progress.step):
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
        own.follow()
        if engine.global_steps == ctx.args.get("last_step"):
            break
    own.check()
    weights = engine.state_dict()
    if ctx.is_main:
        torch.save(weights, ctx.output_dir / "weights.pt")
    return {}


def log_to_file(ctx: Any) -> None:
    """From now on rayzero's log is written to `kept-RANK`: it tells where the state was read from.
    What is selected is logged before this is called: with the last rank's."""
    log = logging.getLogger("rayzero")
    log.setLevel(logging.INFO)
    log.handlers[:] = [logging.FileHandler(ctx.output_dir / f"kept-{ctx.rank}")]


def train_kept(ctx: Any) -> dict[str, Any]:
    """`train`, with a log; args: `update_fails`, the generation, rank and step of an update that
    fails half-way."""
    log_to_file(ctx)
    generation, rank, failing = ctx.args["update_fails"]
    initialize = ctx.initialize

    def initialize_and_fail(**kwargs: Any) -> Any:
        parts = initialize(**kwargs)
        engine = parts[0]

        def fail(*_: Any) -> None:
            place = ctx.generation, ctx.rank, engine.progress.step + 1
            if place == (generation, rank, failing):
                engine.optimizer.state.clear()
                (ctx.output_dir / "update-failed").touch()
                raise ValueError("within an update")

        engine.optimizer.register_step_pre_hook(fail)
        return parts

    ctx.initialize = initialize_and_fail
    return train(ctx)


TORN_STEP = 5


def train_torn(ctx: Any) -> dict[str, Any]:
    """`train`, but rank 1 of the first generation is interrupted where the others have the result
    of its step's vote already. Leaves `voted-RANK`."""
    to_host = CollectiveWork.to_host

    def to_host_late(self: CollectiveWork, result: Tensor) -> Tensor:
        found = to_host(self, result)
        if self._name != "vote":
            return found
        step = ctx._session.engine.progress.step + 1
        if (step, ctx.generation) == (TORN_STEP, 1):
            (ctx.output_dir / f"voted-{ctx.rank}").touch()
            while ctx.rank == 1 and not self._collectives.broken:
                time.sleep(0.01)
        return found

    CollectiveWork.to_host = to_host_late  # type: ignore[method-assign]
    return train(ctx)


def train_pretrained(ctx: Any) -> dict[str, Any]:
    """`train` of a model from the files of this generation, `weights-GENERATION`. Writes how many
    elements each rank read of them."""
    read, count = FileValues.read, 0

    def counted(self: FileValues, start: int, into: Tensor) -> None:
        nonlocal count
        count += into.numel()
        read(self, start, into)

    with rayzero.zero_init():
        model = make_model(torch.float64)
    rayzero.load_pretrained(model, ctx.output_dir / f"weights-{ctx.generation}")
    with mock.patch.object(FileValues, "read", counted):
        engine, _, loader, _ = ctx.initialize(model=model, training_data=Data())
    (ctx.output_dir / f"read-{ctx.generation}-{ctx.rank}").write_text(str(count))
    return _finish(ctx, engine, loader, OwnState(ctx, model))


def train_with_calls(ctx: Any) -> None:
    """`train` by epochs of 5 steps, with calls that need all ranks: of an evaluation and of the
    weights after each epoch; and of the function's own, where `calls` says. Each entry leaves a
    file."""
    calls = ctx.args["calls"]
    (ctx.output_dir / f"entry-{ctx.generation}-{ctx.rank}").touch()
    if "first" in calls:
        found = [f"first on rank {ctx.rank}"]
        dist.broadcast_object_list(found, 0)
        assert found == ["first on rank 0"]
        ranks = torch.full((1,), ctx.rank)
        dist.all_reduce(ranks)
        assert ranks.tolist() == [sum(range(ctx.world_size))]
        dist.barrier()
    if "groups" in calls:
        dist.barrier(dist.new_group())
    model = make_model(torch.float64)
    own = OwnState(ctx, model)
    own.engine, _, loader, _ = ctx.initialize(model=model, training_data=Data())
    engine = own.engine
    weights: dict[str, Tensor] = {}
    for _ in loader.epochs(EPOCHS):
        for x, y in pairwise_first(loader) if "ahead" in calls else loader:
            loss = nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            own.follow()
            if "step" in calls:
                dist.all_reduce(loss.detach())
        with torch.no_grad():
            engine(x)
        weights = engine.state_dict()
        if "epoch" in calls:
            dist.barrier()
    own.check()
    if ctx.is_main:
        torch.save(weights, ctx.output_dir / "weights.pt")


EPOCHS = 3
EPOCH_STEPS = 13
"""In all of them: 13 steps of 12 samples are the first to reach 3 times 50."""


def pairwise_first(batches: Iterable[Any]) -> Iterator[Any]:
    """Reads one batch ahead."""
    before = None
    for batch in batches:
        if before is not None:
            yield before
        before = batch
    yield before


_copy_steps = SharedMemoryBackend._copy_steps


def _slow_copy_steps(self: SharedMemoryBackend, *arguments: Any) -> Iterator[Any]:
    steps = _copy_steps(self, *arguments)
    rounds = next(steps)
    time.sleep(0.1)
    yield rounds
    yield from steps


def train_late(ctx: Any) -> dict[str, Any]:
    """`train`, but rank 0 sleeps between publishing its weights and waiting for their readers, so
    that its peers finish the step first."""
    if ctx.rank == 0:
        SharedMemoryBackend._copy_steps = _slow_copy_steps  # type: ignore[method-assign]
    return train(ctx)


def oracle(steps: int, dtype: torch.dtype = torch.float64, seed: int = 3) -> dict[str, Tensor]:
    """Weights after plain torch training; only the sample order is rayzero's."""
    return oracle_with_ema(steps, dtype, seed)[0]


def oracle_with_ema(
    steps: int, dtype: torch.dtype = torch.float64, seed: int = 3
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """As `oracle`, with the mean of the weights."""
    model = make_model(dtype)
    ema = make_ema(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in batches(steps, dtype, seed):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        ema.update_parameters(model)
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    return weights, dict(ema.module.state_dict())


def batches(
    steps: int, dtype: torch.dtype = torch.float64, seed: int = 3
) -> Iterator[tuple[Tensor, Tensor]]:
    """The samples of a job's first steps, of all ranks."""
    from rayzero.engine.data.sampling import SampleOrder

    data, order = Data(dtype), SampleOrder(LENGTH, seed)
    for step in range(steps):
        batch = [data[int(value)] for value in order.indices(step * SAMPLES, SAMPLES)]
        yield torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch])


def engine_config(stage: int) -> dict[str, Any]:
    return {
        "gradient_clipping": 0,
        "train_batch_size": SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 200},
    }
