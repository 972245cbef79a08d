"""The interface of a source of samples by position, and the source of a map-style dataset."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch.utils.data import IterableDataset

from rayzero.engine.data.loader_process import BadSample, SampleMaker, make_sample
from rayzero.engine.data.sampling import MicroBatch, SampleOrder, StepSplit
from rayzero.engine.data.way_out import way_out
from rayzero.engine.errors import DataError, named_errors

Register = Callable[[str, Callable[[], Any], Callable[[Any], object]], None]
"""`TrainingState.register`: (name, getter, setter) of state that a source keeps."""


class MapDataset(Protocol):
    """A map-style dataset: `dataset[i]` for i in [0, len(dataset)).

    If the dataset has `__getitems__(indices: list[int]) -> list[sample]`, that is called instead;
    in the loader's processes with one index at a time.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class SampleSource(ABC):
    """The job's samples by position; a position is a sample cursor. Used by the thread that reads
    ahead.

    Attributes:
        length: number of samples of an epoch.
        may_wait: `read` may wait without limit for samples that other processes make; the training
            thread shows signs of life meanwhile.
        maker: makes a sample of a raw value that `read` returns, also in another process; None: raw
            values are samples.
        make_all: makes the samples of several raw values at once, in this process; None: `maker`
            makes one by one.
        seed: seeds the random numbers of `maker` in other processes.
    """

    length: int
    may_wait = False
    maker: SampleMaker | None = None
    make_all: Callable[[list[Any]], list[Any]] | None = None
    seed = 0

    def begin(  # noqa: B027 -- a default
        self, cursor: int, split: StepSplit, check: Callable[[], None]
    ) -> None:
        """Called before the first `read` of an iteration. Its first step is the one at `cursor`;
        `split` has this rank's part of each step."""

    @abstractmethod
    def read(
        self, step: int, part: MicroBatch, *, is_last: bool, check: Callable[[], None]
    ) -> tuple[list[int], Sequence[Any]]:
        """Returns the numbers of the samples of a micro-batch, and a raw value for each. Without a
        `maker`, the sequence may have a method `collate()`, which replaces `default_collate`.

        Args:
            step: the cursor at which the micro-batch's step begins.
            is_last: whether this is the step's last micro-batch on this rank.
            check: raises if reading is to stop; `read` calls it while waiting.
        """

    def read_samples(self, start: int, count: int) -> list[Any]:
        """Returns the samples at `start` to `start + count - 1`, made in this thread. Raises
        DataError that names a bad sample."""
        part = MicroBatch(0, count, 1.0)
        _, raws = self.read(start, part, is_last=False, check=lambda: None)
        if (maker := self.maker) is None:
            return list(raws)
        samples = []
        for raw in raws:
            failing = self.describe(raw)  # `workers/stacks.py` reads this variable of the frame
            samples.append(sample := make_sample(maker, raw))
            if isinstance(sample, BadSample):
                raise DataError(
                    f"{failing} cannot be used: {sample.reason}",
                    fix="correct the data, its dataset or transform",
                ) from sample.cause
        return samples

    def describe(self, raw: Any) -> str:
        """Names the sample that is made of `raw`: its source, block and row."""
        return f"sample {raw} of the training data"


class DatasetSource(SampleSource):
    """The samples of a dataset in their global order. Raises DataError if it is not map-style, or
    empty."""

    def __init__(self, dataset: MapDataset, seed: int) -> None:
        self._order = SampleOrder(dataset_length(dataset), seed)
        self.length = self._order.length
        self.maker = partial(fetch_item, dataset)
        self.make_all = getattr(dataset, "__getitems__", None)
        self.seed = seed

    def read(
        self, step: int, part: MicroBatch, *, is_last: bool, check: Callable[[], None]
    ) -> tuple[list[int], list[Any]]:
        indices = self._order.indices(step + part.start, part.read_count).tolist()
        return indices, indices


def fetch_item(dataset: MapDataset, index: int) -> Any:
    if (get_items := getattr(dataset, "__getitems__", None)) is not None:
        return get_items([index])[0]
    return dataset[index]


def dataset_length(dataset: object) -> int:
    name = type(dataset).__name__
    map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset | str | bytes) or not map_style:
        raise DataError(
            f"the training data is a {name}, not a map-style dataset",
            "a map-style dataset, with __len__ and __getitem__",
            f"training_data: {way_out(dataset)}; or rayzero.data.iterable(...) of it, if it has a "
            "state_dict()",
        )
    fix = "correct the dataset, or the data behind it"
    with named_errors(lambda: f"len() of the training data (a {name}) failed", fix=fix):
        length = len(dataset)  # type: ignore[arg-type]
    if length < 1:
        raise DataError(f"the training data (a {name}) is empty", "one sample or more", "the data")
    return length
