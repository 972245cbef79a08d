"""Streams and iterables as training data of Trainer and Accelerate.

A stream is a map-style dataset, and is cut, skipped and read again as one. An iterable is read from
its first sample by each new call of the script, and what the job has trained on is left out: its
order must not depend on the number of ranks, and Trainer counts no epochs of it.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset

from rayzero.engine.data.streams.positions import StreamDataset, StreamSampler
from rayzero.engine.data.streams.source import STATE_NAME
from rayzero.engine.data.way_out import way_out
from rayzero.engine.errors import ConfigError, DataError
from rayzero.workers.launch.adapters import Original
from rayzero.workers.session import JobSession


def check_train_dataset(
    _: JobSession, init: Original, trainer: Any, *args: Any, **options: Any
) -> None:
    """`Trainer()`. Raises ConfigError for training data that a DataLoader cannot read."""
    data = args[3] if len(args) > 3 else options.get("train_dataset")
    is_map_style = hasattr(data, "__getitem__") and not isinstance(data, str)
    can_read = isinstance(data, IterableDataset) or is_map_style
    if data is not None and not can_read:
        raise ConfigError(
            f"Trainer(train_dataset=...) got a {type(data).__name__}",
            "a map-style dataset, a stream of rayzero.data, or an iterable dataset",
            f"train_dataset: {way_out(data)}",
        )
    init(trainer, *args, **options)


def choose_sampler(_: JobSession, choose: Original, trainer: Any, *args: Any) -> Any:
    """`Trainer._get_train_sampler`. A stream shuffles itself."""
    data = args[0] if args and args[0] is not None else trainer.train_dataset
    if not isinstance(data, StreamDataset):
        return choose(trainer, *args)
    strategy = trainer.args.train_sampling_strategy
    if strategy not in ("random", "sequential"):
        raise ConfigError(
            f"train_sampling_strategy={strategy!r}, which orders samples, of a stream",
            '"random" or "sequential": the order of the stream, which is shuffled',
            "leave it out; rayzero.data.PackedBlocks makes samples of equal length",
        )
    return StreamSampler(data)


def check_training_data(session: JobSession, loader: Any, first_ranks: int) -> None:
    """Follows the stream that a prepared loader reads. Raises ConfigError if its order depends on
    the ranks, and those of the job's beginning were others."""
    data = loader.dataset
    if isinstance(data, StreamDataset) and STATE_NAME not in session.registry:
        data.keep_identity(session.registry.register)
    is_of_datasets = type(data).__module__.startswith("datasets.")
    if not (is_of_datasets and isinstance(data, IterableDataset)):
        return
    ranks = dist.get_world_size()
    if type(loader).__name__ != "DataLoaderDispatcher" and ranks != first_ranks:
        raise ConfigError(
            f"an iterable dataset's shards were divided among {first_ranks} ranks, now among "
            f"{ranks}",
            "dispatch_batches=True, Accelerate's default: rank 0 reads all",
            f"the training data: {way_out(data)}",
        )


def check_first_batch(batches: list[Any], trainer: Any) -> None:
    """Called with what Trainer reads first in a job that has begun. Raises DataError if the data
    has ended before."""
    data = trainer.train_dataset
    if not batches and isinstance(data, IterableDataset):
        raise DataError(
            f"the training data, a {type(data).__name__}, has ended before step "
            f"{trainer.state.global_step}, behind which the job goes on: Trainer cannot continue "
            "in a later epoch of an iterable",
            fix=f"train_dataset: {way_out(data)}",
        )
