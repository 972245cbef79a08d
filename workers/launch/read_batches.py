"""Keeps the batches that a script reads from a torch DataLoader, and leaves out those of steps that
the job has trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from rayzero.engine.data.streams.positions import StreamSampler
from rayzero.engine.data.way_out import way_out
from rayzero.engine.engine import Engine
from rayzero.engine.errors import DataError
from rayzero.engine.tensor_tree import iter_tensors, map_tensors

_OPTIONS = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator")
_OPTIONS_OF_WORKERS = ("multiprocessing_context", "prefetch_factor")
_begin: Callable[[Any], Iterator[Any]] = DataLoader.__iter__  # before a script's are followed


class Batch:
    """A batch as it was read from its loader.

    Args:
        epoch: the loader's iteration, counted from 1.
        copies: whether to keep copies of the tensors, for a script that changes them in place.
            Otherwise the tensors are shared with the script.

    Attributes:
        rng: for the first batch of an epoch, the random states after it was read: reading it has
            drawn the epoch's order. Otherwise None.
    """

    def __init__(self, value: Any, epoch: int, *, copies: bool) -> None:
        self.epoch = epoch
        self.rng: dict[str, Any] | None = None
        self._copies = copies
        self._kept = map_tensors(value, Tensor.clone if copies else Tensor.detach)
        self._versions = self._count_changes()

    @property
    def is_changed(self) -> bool:
        """Whether the script has changed one of the tensors in place."""
        return self._versions != self._count_changes()

    def value(self) -> Any:
        """Returns new containers of the kept tensors, or of copies of them."""
        return map_tensors(self._kept, Tensor.clone if self._copies else Tensor.detach)

    def _count_changes(self) -> list[int]:
        tensors = iter_tensors(self._kept)
        return [tensor._version for tensor in tensors if not tensor.is_inference()]


def leave_out_epoch(loader: Any, epoch: int) -> None:
    """Advances the generators of a loader and its sampler as an epoch, counted from 1, does; not
    torch's global generator."""
    with torch.random.fork_rng(devices=[]):
        if epoch == 1 or not loader.persistent_workers:
            _draw_seed(loader)
        for _ in loader.batch_sampler or ():
            pass


def keep_seed(loader: Any) -> None:
    """Makes a loader with persistent workers draw their seed from a copy of its generator. The
    process that began the loader's first epoch has drawn the seed from the generator itself."""
    given = loader.generator
    state = torch.get_rng_state() if given is None else given.get_state()
    loader.generator = torch.Generator().set_state(state)


def iterate_behind(loader: Any, batches: int, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Returns an iteration without its first `batches` batches. These are not even loaded if a
    sampler orders the samples, and the loader's workers do not persist.

    Args:
        begin: torch's own `__iter__` of the loader.
    """
    if loader.batch_sampler is None or loader.persistent_workers:
        rest = begin()
        for _ in islice(rest, batches):
            pass
        return rest
    _draw_seed(loader)
    order = iter(loader.batch_sampler)
    for _ in islice(order, batches):
        pass
    options = {name: getattr(loader, name) for name in _OPTIONS}
    if loader.num_workers:
        options |= {name: getattr(loader, name) for name in _OPTIONS_OF_WORKERS}
    shorter: Any = DataLoader(loader.dataset, batch_sampler=order, **options)
    return _begin(shorter)


def _draw_seed(loader: Any) -> None:
    """Draws the seed of a DataLoader's workers, as the loader does before its sampler draws an
    order: in each epoch, or once if the workers persist."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


@contextmanager
def random_state_of(state: Tensor) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        yield


def has_constant_batches(engine: Engine) -> bool:
    """Returns whether both the global batch and the micro-batch are independent of the number of
    ranks."""
    config = engine.settings.config
    return None not in (config.train_batch_size, config.train_micro_batch_size_per_gpu)


def is_cut_by_sampler(loader: Any, micro_batch: int) -> bool:
    """Returns whether a loader's batches are micro-batches whose samples a DistributedSampler
    divides among the ranks."""
    return (
        type(loader.sampler) in (DistributedSampler, StreamSampler)
        and type(loader.batch_sampler) is BatchSampler
        and loader.batch_size == micro_batch
    )


def check_ranks(loader: Any, ranks: int) -> None:
    """Checks that an iterable dataset is read by as many ranks as before.

    Raises:
        DataError: it is not. Only the script knows which samples the dataset yields on a rank.
    """
    if isinstance(loader.dataset, IterableDataset) and ranks != dist.get_world_size():
        raise DataError(
            f"the iterable dataset {type(loader.dataset).__name__} was read by {ranks} ranks, now "
            f"there are {dist.get_world_size()}: the script alone knows how to divide its rest",
            "as many ranks as at the beginning, where a DataLoader reads an iterable",
            f"the DataLoader's dataset: {way_out(loader.dataset)}",
        )


def cut_for(loader: Any, rank: int, ranks: int) -> None:
    """Makes a DistributedSampler divide its samples among another number of ranks.

    Rank r takes the samples r, r + ranks, r + 2 * ranks, ... of one order. The first batches of all
    ranks together are therefore the same samples for any number of ranks.
    """
    sampler = loader.sampler
    samples = len(sampler.dataset)
    each = samples // ranks if sampler.drop_last else -(-samples // ranks)
    sampler.rank, sampler.num_replicas = rank, ranks
    sampler.num_samples, sampler.total_size = each, each * ranks
