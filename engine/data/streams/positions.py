"""Streams as map-style datasets of their positions, for torch's DataLoader and what is built on it.

Item p is the sample at position p; epoch follows epoch without an end. Code that divides positions
among ranks, skips positions or reads them again works for a stream, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import Dataset, DistributedSampler, RandomSampler

from rayzero.engine.data.sample_source import Register
from rayzero.engine.data.sampling import TrainingProgress
from rayzero.engine.data.streams.block import BlockSource
from rayzero.engine.data.streams.source import BlockStream, StreamSource
from rayzero.engine.data.way_out import way_out
from rayzero.engine.errors import ConfigError
from rayzero.engine.session import current_session


class StreamDataset(BlockStream, Dataset[Any]):
    """The result of `stream` and `mix`: `training_data`, or the dataset of a DataLoader that reads
    its positions in ascending order: with a `StreamSampler`, or without a sampler.

    A DataLoader's positions are not grouped in steps, so rows are not sorted by block: the order is
    `order(seed, 1)`. Each process reads all blocks for itself.
    """

    def __len__(self) -> int:
        """Number of samples of an epoch."""
        return self._source().length

    def __iter__(self) -> Iterator[Any]:
        """Yields the samples of the first epoch."""
        return (self[position] for position in range(len(self)))

    def __getitem__(self, position: int) -> Any:
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """Returns the samples at some positions, from 0. Raises as `StreamSource.read_samples`."""
        source, samples = self._source(), list[Any]()
        for start, count in _ranges(positions):
            if start < 0:
                raise IndexError(f"position {start} of a stream, whose first one is 0")
            samples += source.read_samples(start, count)
        return samples

    def keep_identity(self, register: Register) -> None:
        """Registers the values that the order depends on with a training state. They are compared
        when that is loaded."""
        self._source(register)

    def __getstate__(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"_seed": self._find_seed()}

    @cached_property
    def _sources(self) -> dict[tuple[int, int], StreamSource]:
        """Sources by process and seed: a forked process neither uses nor frees those of its parent,
        whose locks may be held."""
        return {}

    def _source(self, register: Register | None = None) -> StreamSource:
        key = os.getpid(), self._find_seed()
        if register is not None or key not in self._sources:
            progress = TrainingProgress(global_batch=1)
            self._sources[key] = StreamSource(self, key[1], progress, register or (lambda *_: None))
        return self._sources[key]

    def _find_seed(self) -> int:
        """Returns the job's seed. In a thread or process without a session, returns the seed that
        was found before, which is pickled with the stream."""
        if (session := current_session()) is not None:
            vars(self)["_seed"] = session.seed
        return int(vars(self).get("_seed", 0))


class StreamSampler(DistributedSampler[Any]):
    """A sampler of the positions of one epoch of a stream, in ascending order: of `num_replicas`
    ranks, rank r gets r, r + num_replicas, r + 2 * num_replicas, ... `set_epoch`, which Accelerate
    and Trainer call by themselves, chooses the epoch. Each epoch has its own order of samples."""

    def __init__(self, stream: StreamDataset, num_replicas: int = 1, rank: int = 0) -> None:
        if isinstance(stream, BlockSource):
            seen = f"StreamSampler() got a {type(stream).__name__}"
            raise ConfigError(seen, "a stream", f"give it {way_out(stream)}")
        super().__init__(stream, num_replicas, rank, shuffle=False)

    def __iter__(self) -> Iterator[int]:
        samples = len(self.dataset)  # type: ignore[arg-type]
        for number in range(self.rank, self.total_size, self.num_replicas):
            yield self.epoch * samples + number % samples  # wraps: all ranks have equally many


def check_sampler(loader: Any) -> None:
    """Raises ConfigError if a DataLoader's dataset is a source, which has no positions; or if it
    reads a stream in random order: each block would be read for a few rows at a time."""
    if isinstance(loader.dataset, BlockSource):
        seen = f"a DataLoader got a {type(loader.dataset).__name__}"
        raise ConfigError(seen, "a stream", f"give it {way_out(loader.dataset)}")
    sampler = loader.sampler
    shuffles = isinstance(sampler, RandomSampler)
    if isinstance(sampler, DistributedSampler):
        shuffles = sampler.shuffle
    if shuffles and isinstance(loader.dataset, StreamDataset):
        raise ConfigError(
            f"a DataLoader shuffles a stream ({type(sampler).__name__})",
            "the order of the stream, which is shuffled: see shuffle_window",
            "leave shuffle out; sampler=rayzero.data.StreamSampler(stream) changes the order from "
            "epoch to epoch",
        )


def _ranges(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the start and the length of each range of consecutive positions."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return [(int(part[0]), len(part)) for part in np.split(positions, breaks) if len(part)]
