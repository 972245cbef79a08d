"""Streams and iterables as training data of Trainer and Accelerate.

A stream is cut, skipped and read again as a map-style dataset. Each new call of the script reads an
iterable from its first sample, and leaves out the samples that the job has trained on. An
iterable's order must therefore not depend on the number of ranks. Trainer counts no epochs of an
iterable.
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
    """Replaces `Trainer()`. Raises ConfigError for training data that a DataLoader cannot read."""
    data = args[3] if len(args) > 3 else options.get("train_dataset")
    is_map_style = hasattr(data, "__getitem__") and not isinstance(data, str)
    can_read = isinstance(data, IterableDataset) or is_map_style
    if data is not None and not can_read:
        raise ConfigError(
            f"Trainer(train_dataset=...) got a {type(data).__name__}",
            "a map-style dataset, a stream of rayzero.data, or an iterable dataset",
            f"set train_dataset: {way_out(data)}",
        )
    init(trainer, *args, **options)


def choose_sampler(_: JobSession, choose: Original, trainer: Any, *args: Any) -> Any:
    """Replaces `Trainer._get_train_sampler`: a stream shuffles itself."""
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
    """Keeps the identity of a prepared loader's stream in the training state. Raises ConfigError if
    the order of an iterable depends on the ranks, and the job began with other ranks."""
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
            f"replace the training data: {way_out(data)}",
        )


def check_first_batch(batches: list[Any], trainer: Any) -> None:
    """Called with the first batches that Trainer reads in a job that has finished steps. Raises
    DataError if an iterable has ended before these."""
    data = trainer.train_dataset
    if not batches and isinstance(data, IterableDataset):
        raise DataError(
            f"the training data, a {type(data).__name__}, has ended before step "
            f"{trainer.state.global_step}, after which the job continues: Trainer cannot "
            "continue in a later epoch of an iterable",
            fix=f"set train_dataset: {way_out(data)}",
        )
