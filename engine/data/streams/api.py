"""The functions of `rayzero.data` by which a script describes a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from rayzero.engine.data.streams.block import BlockSource, check_source
from rayzero.engine.data.streams.positions import StreamDataset
from rayzero.engine.data.streams.readers import IterableStream, Make
from rayzero.engine.data.streams.source import BlockStream, Mixture, StreamPart, Transform
from rayzero.engine.errors import ConfigError, did_you_mean, is_number

_CACHE_BYTES = 1 << 30
_THREADS = 4
_READ_TIMEOUT_S = 600.0


def stream(
    source: BlockSource,
    shuffle_window: int = 16,
    cache_bytes: int = _CACHE_BYTES,
    transform: Transform | None = None,
    threads: int = _THREADS,
    read_timeout_s: float = _READ_TIMEOUT_S,
) -> StreamDataset:
    """Makes training data of a source of blocks: each row once an epoch, in an order that depends
    on the job's seed and the position only, at any number of workers, through faults and resizes.

    A sample is a dict of a row's columns: lists of numbers are numpy arrays, others Python values.
    The rows of a step are sorted by block, so the rows of a micro-batch are of few blocks. Without
    a transform and a collate_fn, a batch of numbers is copied out of the blocks as arrays.

    Args:
        shuffle_window: number of blocks whose rows are mixed. A worker holds its part of two
            windows. Blocks at the ends of parts are read by two workers: with N workers, at most
            (N - 1) / shuffle_window of all blocks are read once more.
        cache_bytes: the most memory of a worker for blocks and for reading them. Reading a block
            takes four times its size, and Arrow's pool keeps 128 MiB for each thread. If the latter
            is more than a quarter of `cache_bytes`, Arrow allocates by jemalloc from then on, which
            returns freed memory, unless ARROW_DEFAULT_MEMORY_POOL chooses another pool.
        transform: makes a sample of the dict of a row, in the thread that reads ahead, or in
            `rayzero.loader.num_workers` processes.
        threads: the most threads of a worker that read blocks; for local files, not more than it
            has cores.
        read_timeout_s: how long one block may take.

    Raises:
        ConfigError: a number is not positive.
    """
    check_source(source, "stream()")
    part = StreamPart(source, shuffle_window, transform, source.name)
    return StreamDataset((part,), cache_bytes, threads, read_timeout_s)


def mix(
    sources: Mapping[str, tuple[BlockSource | BlockStream, float]],
    changes: Mapping[int, Mapping[str, float]] | None = None,
    max_epochs: Mapping[str, float] | None = None,
    cache_bytes: int = _CACHE_BYTES,
    threads: int = _THREADS,
    read_timeout_s: float = _READ_TIMEOUT_S,
) -> StreamDataset:
    """Mixes sources by weights: after any number of samples, each source has had its share of them,
    to within one sample.

    Args:
        sources: {name: (source, weight)}. A source may be a `stream` with its own `shuffle_window`
            and `transform`; its other settings are those of the mixture.
        changes: {step: {name: weight}}: weights that change before a step. Steps count from 0, and
            have the `train_batch_size` with which the job began.
        max_epochs: {name: how often its rows are used, such as 1.5}. After that, the other sources
            share by their weights. By default epochs repeat. If each source has a limit, an epoch
            of the mixture ends when all are reached; otherwise it has as many samples as all
            sources together.

    Raises:
        ConfigError: a name is unknown, or a number is not positive.
    """
    if not isinstance(sources, Mapping) or not sources:
        raise ConfigError("mix() has no sources", "one or more", "name them: {'web': (web, 0.7)}")
    changes, max_epochs = changes or {}, max_epochs or {}
    parts, first = [], {}
    for name, entry in sources.items():
        if not isinstance(entry, Sequence) or len(entry) != 2:
            raise ConfigError(
                f"mix() got a {type(entry).__name__} for {name!r}",
                "(source, weight)",
                f"write {name!r}: (source, 0.5)",
            )
        source, first[name] = entry
        given = source if isinstance(source, BlockStream) else stream(source)
        if given.mixture is not None:
            raise ConfigError(
                f"source {name!r} of a mixture is a mixture", "a source, or a stream of one"
            )
        parts.append(replace(given.parts[0], name=name))
    _check_numbers("weight", first, sources)
    _check_numbers("max_epochs", max_epochs, sources, positive=True)
    is_by_step = isinstance(changes, Mapping)
    if not is_by_step or any(not is_number(step, whole=True) or step < 0 for step in changes):
        raise ConfigError(f"changes of a mixture is {changes!r}", "{step: {name: weight}}")
    weights = {0: first}
    current = first
    for step, change in sorted(changes.items()):
        _check_numbers("weight", change, sources)
        current = {**current, **change}
        weights[step] = current
    mixture = Mixture(
        {step: tuple(by_name.values()) for step, by_name in weights.items()},
        tuple(max_epochs.get(name) for name in sources),
    )
    return StreamDataset(tuple(parts), cache_bytes, threads, read_timeout_s, mixture)


def iterable(
    source: Make | Any,
    readers: int | None = None,
    rows: int | Sequence[int] | None = None,
    snapshot_every: int = 1000,
    transform: Callable[[Any], Any] | None = None,
    replay: bool = False,
    read_ahead: int = 64,
    read_timeout_s: float = _READ_TIMEOUT_S,
) -> IterableStream:
    """Makes training data of iterables. A fixed number of readers yield their rows in turn, at any
    number of workers. Faults and resizes neither lose nor repeat a row, if a reader yields the same
    rows whenever it is made, also after `load_state_dict`.

    With `rows`, an epoch has each row once; if readers have different numbers of rows, those that
    still have some take turns. Without `rows`, a reader that ends begins again, and the loader's
    epoch has no end: train with `loader.until(step)`.

    One worker runs a reader if the readers are a multiple of the workers and divide
    `train_batch_size`. Otherwise two workers, whose parts of a step meet in a reader, both read all
    of its rows. When a reader begins again, fewer than `snapshot_every` rows are read again.

    Args:
        source: `make(reader, readers)`, which returns a new iterable of that reader's rows, with
            `state_dict()` and `load_state_dict(state)`, such as a stateful dataset, or a node or a
            loader of torchdata; `set_epoch(epoch)` is called if it has one. Called by a thread for
            each reader. Or a dataset with `shard(num_shards, index)`, such as an `IterableDataset`
            of Hugging Face.
        readers: by default the dataset's number of shards; at most that.
        rows: number of rows of each reader in an epoch, or one number for all readers.
        snapshot_every: rows of a reader between two snapshots of its state, which are part of the
            training state.
        transform: makes a sample of a row, in the thread that reads ahead, or in
            `rayzero.loader.num_workers` processes.
        replay: a reader that begins again reads from the beginning of its epoch; it needs no state.
        read_ahead: rows of each reader that may be in memory before they are needed.
        read_timeout_s: how long one row may take.

    Raises:
        ConfigError: an argument is wrong. Raised later, when a reader is made, if `replay` is not
            set and the reader has no state, or an inexact one, such as that of a shuffle buffer.
    """
    make, shards = source, None
    if hasattr(source, "shard"):
        make = lambda reader, readers: source.shard(num_shards=readers, index=reader)  # noqa: E731
        shards = getattr(source, "num_shards", None)
    elif not callable(source):
        raise ConfigError(
            f"iterable() got a {type(source).__name__}",
            "a function (reader, readers), which returns a new iterable; or a dataset with shard()",
            f"iterable(lambda reader, readers: {type(source).__name__}(...), readers=8)",
        )
    number = _count_readers(readers, shards)
    given: Any = (rows,) * number if is_number(rows) else rows
    own = None if given is None else tuple(given)
    name = getattr(getattr(source, "info", None), "dataset_name", None) or "iterable"
    return IterableStream(
        make, number, own, snapshot_every, transform, replay, read_ahead, read_timeout_s, name
    )


def _count_readers(readers: int | None, shards: int | None) -> int:
    number: Any = shards if readers is None else readers
    if not is_number(number, whole=True) or (shards is not None and number > shards):
        raise ConfigError(
            f"iterable() has {readers!r} readers",
            "a number" if shards is None else f"at most {shards}, the shards of the dataset",
            "give readers=, a multiple of the workers, and a dataset of as many shards",
        )
    return int(number)


def _check_numbers(
    what: str, given: Mapping[str, Any], sources: Mapping[str, object], *, positive: bool = False
) -> None:
    """Checks the numbers that a mixture has for some of its sources, by name."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what} of a mixture is {given!r}", "{name: number}")
    for name, value in given.items():
        if name not in sources:
            raise ConfigError(
                f"{what} of {name!r} in a mixture{did_you_mean(str(name), list(sources))}",
                f"the names of its sources: {', '.join(sources)}",
            )
        is_right = is_number(value) and isfinite(value) and value >= 0
        if not is_right or (positive and not value):
            allowed = "a number above 0" if positive else "a number, 0 or more"
            raise ConfigError(f"{what} of {name!r} in a mixture is {value!r}", allowed)
