"""Training loops of random shape over the loader, on the ranks of a group or of a job, and plain
torch over the samples that they recorded."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from queue import Queue
from threading import Thread
from typing import Any, Literal

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import rayzero
from rayzero.engine.data.loader import StepLoader
from rayzero.engine.data.sampling import SampleOrder
from rayzero.engine.errors import CollectiveError, EngineError
from rayzero.engine.session import HostSession

SAMPLES, LR, STEPS, EPOCHS = 17, 0.1, 5, 2
Batch = tuple[Tensor, Tensor]
Mistake = Literal["drop", "double", "no step", "nested loader"]


@dataclass(frozen=True)
class Shape:
    """A training loop.

    Attributes:
        ahead: batches that are read before they are trained on; None: all of them.
        threaded: they are read by a thread.
        copied: the model gets other tensors than the loader yielded.
        over: what the loop is over.
        stops: the loop is left before these micro-batches, and begun again.
        mistakes: what the loop does at one micro-batch, counted from its beginning.
    """

    stage: int
    batch: int
    micro_batch: int
    ahead: int | None = 0
    threaded: bool = False
    copied: bool = False
    over: Literal["until", "steps", "epochs", "chained epochs"] = "until"
    losses: int = 1
    own_backward: bool = False
    stops: tuple[int, ...] = ()
    mistakes: tuple[tuple[Mistake, int], ...] = ()

    @property
    def may_fail(self) -> bool:
        """Whether an error may be its end. What it has read to the end and left may be meant to be
        trained on later: it ends so if it is not."""
        reads_ahead = self.threaded or self.ahead != 0
        return bool(self.mistakes) or (bool(self.stops) and reads_ahead)


@dataclass(frozen=True)
class Outcome:
    """What became of a loop on one rank."""

    error: str | None
    weights: dict[str, Tensor]
    samples: list[list[int]]  # of each finished step, of this rank


class RecordedSamples(HostSession):
    """The part of a session that gets the samples."""

    def __init__(self) -> None:
        self.pending: list[int] = []

    def on_samples_consumed(self, samples: Sequence[int]) -> None:
        self.pending += samples


def make_data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1)).double()


def engine_config(shape: Shape) -> dict[str, Any]:
    return {
        "gradient_clipping": 0,
        "train_batch_size": shape.batch,
        "train_micro_batch_size_per_gpu": shape.micro_batch,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": shape.stage},
    }


def run_loop(rank: int, world: int, shape: Shape) -> Outcome:
    """Trains; an EngineError ends it, here and, as a job's end does, on the other ranks."""
    engine, _, loader, _ = rayzero.initialize(
        model=make_model(), training_data=make_data(), config=engine_config(shape)
    )
    assert loader is not None
    recorded = RecordedSamples()
    engine._step.micro_batches.session = recorded  # type: ignore[assignment]
    samples: list[list[int]] = []
    error = None
    try:
        for _ in _train(engine, loader, shape):
            while len(samples) < engine.global_steps:
                samples.append(recorded.pending)
                recorded.pending = []
        engine.internals.micro_batches.check_end()
        weights = engine.state_dict()
    except (EngineError, CollectiveError) as raised:
        error, weights = str(raised), {}
        if world:
            dist.destroy_process_group()
    engine.close()
    return Outcome(error, weights, samples)


def train_job(ctx: Any) -> None:
    """The same loop as the function of a job, whose args are those of the shape."""
    shape = Shape(**ctx.args)
    engine, _, loader, _ = ctx.initialize(model=make_model(), training_data=make_data())
    for _ in _train(engine, loader, shape):
        pass
    weights = engine.state_dict()
    if ctx.is_main:
        torch.save(weights, ctx.output_dir / "weights.pt")


def _train(engine: Any, loader: StepLoader, shape: Shape) -> Iterator[None]:
    """Yields after each call of `step()`."""
    turn, stops, mistakes = 0, list(shape.stops), {at: kind for kind, at in shape.mistakes}
    again = True
    while again:
        again = False
        for batch in _read(_over(loader, shape), shape):
            if stops and turn == stops[0]:
                stops.pop(0)
                again = True
                break
            mistake = mistakes.get(turn)
            turn += 1
            if mistake == "drop":
                continue
            if mistake == "nested loader":
                next(iter(loader))
            for _ in range(2 if mistake == "double" else 1):
                for _ in range(shape.losses):
                    inputs, targets = (it.clone() for it in batch) if shape.copied else batch
                    loss = nn.functional.mse_loss(engine(inputs), targets) / shape.losses
                    if shape.own_backward:
                        loss.backward()
                    else:
                        engine.backward(loss)
                if mistake != "no step":
                    engine.step()
                    yield


def _over(loader: StepLoader, shape: Shape) -> Iterable[Batch]:
    match shape.over:
        case "until":
            return loader.until(STEPS)
        case "steps":
            return loader.steps(max(0, STEPS - loader.progress.step))
        case "epochs":
            return _flat_epochs(loader, shape)
        case "chained epochs":
            return itertools.chain.from_iterable(loader for _ in loader.epochs(EPOCHS))


def _flat_epochs(loader: StepLoader, shape: Shape) -> Iterator[Batch]:
    for _ in loader.epochs(EPOCHS):
        yield from _read(loader, shape)


def _read(batches: Iterable[Batch], shape: Shape) -> Iterable[Batch]:
    """The batches, read ahead."""
    if shape.over == "epochs" and not isinstance(batches, StepLoader):
        return batches  # each of its epochs is read ahead
    if shape.ahead is None:
        return list(batches)
    if shape.threaded:
        return in_a_thread(batches, shape.ahead)
    return ahead(batches, shape.ahead)


def ahead(batches: Iterable[Batch], count: int) -> Iterator[Batch]:
    held: deque[Batch] = deque()
    for batch in batches:
        held.append(batch)
        if len(held) > count:
            yield held.popleft()
    yield from held


def in_a_thread(batches: Iterable[Batch], count: int) -> Iterator[Batch]:
    queue: Queue[Batch | BaseException | None] = Queue(count + 1)

    def read() -> None:
        try:
            for batch in batches:
                queue.put(batch)
            queue.put(None)
        except EngineError as error:  # closed by the loop's next iteration
            queue.put(error)

    thread = Thread(target=read, daemon=True)
    thread.start()
    while (item := queue.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        yield item


def plain_weights(
    samples: Sequence[Sequence[int]], data: TensorDataset | None = None
) -> dict[str, Tensor]:
    """Those of plain torch, a step over each of these batches."""
    model, data = make_model(), data or make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for batch in samples:
        inputs, targets = data[list(batch)]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model.state_dict()


def expected_samples(shape: Shape) -> list[list[int]]:
    """Of each step of a loop without mistakes."""
    order = SampleOrder(SAMPLES, 0)
    steps = STEPS if shape.over in ("until", "steps") else -(-EPOCHS * SAMPLES // shape.batch)
    return [order.indices(it * shape.batch, shape.batch).tolist() for it in range(steps)]


turns = st.integers(0, 14)


mistakes = st.tuples(st.sampled_from(["drop", "double", "no step", "nested loader"]), turns)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    values: dict[str, Any] = {
        "stage": st.integers(0, 3),
        "batch": st.integers(3, 9),
        "micro_batch": st.integers(1, 3),
        "ahead": st.one_of(st.none(), st.integers(0, 3)),
        "threaded": st.booleans(),
        "copied": st.booleans(),
        "over": st.sampled_from(["until", "steps", "epochs", "chained epochs"]),
        "losses": st.integers(1, 2),
        "own_backward": st.booleans(),
        "stops": st.lists(turns, max_size=2, unique=True).map(lambda it: tuple(sorted(it))),
        "mistakes": st.one_of(st.just(()), st.tuples(mistakes)),
    }
    shape = Shape(**{name: draw(strategy) for name, strategy in values.items()})
    # The engine goes by the order of what it does not recognize: a batch trained on twice there can
    # make up for one that was read ahead and left.
    return replace(shape, stops=()) if shape.copied and shape.mistakes else shape
