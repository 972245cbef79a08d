"""Batches that a script has read of a torch DataLoader: to yield again, and to leave out."""

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
    """A batch as it was read.

    Args:
        epoch: the iteration of its loader, counted from 1.
        copies: keeps copies of its tensors, which the script changes; else they are shared.

    Attributes:
        rng: the random states after the first batch of an epoch, whose order was drawn before it.
    """

    def __init__(self, value: Any, epoch: int, *, copies: bool) -> None:
        self.epoch = epoch
        self.rng: dict[str, Any] | None = None
        self._copies = copies
        self._kept = map_tensors(value, Tensor.clone if copies else Tensor.detach)
        self._versions = self._count_changes()

    @property
    def is_changed(self) -> bool:
        """Whether the script has changed a tensor of it in place."""
        return self._versions != self._count_changes()

    def value(self) -> Any:
        """Returns new containers with the tensors, or with copies of them."""
        return map_tensors(self._kept, Tensor.clone if self._copies else Tensor.detach)

    def _count_changes(self) -> list[int]:
        tensors = iter_tensors(self._kept)
        return [tensor._version for tensor in tensors if not tensor.is_inference()]


def leave_out_epoch(loader: Any, epoch: int) -> None:
    """Draws what an epoch, counted from 1, draws from the generators of a loader and its sampler;
    torch's global one stays as it is."""
    with torch.random.fork_rng(devices=[]):
        if epoch == 1 or not loader.persistent_workers:
            _draw_seed(loader)
        for _ in loader.batch_sampler or ():
            pass


def keep_seed(loader: Any) -> None:
    """Has a loader whose workers persist draw their seed from a copy of its generator: another
    process, which began an earlier epoch, has drawn it."""
    given = loader.generator
    state = torch.get_rng_state() if given is None else given.get_state()
    loader.generator = torch.Generator().set_state(state)


def iterate_behind(loader: Any, batches: int, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """An iteration without the first `batches`, which are not loaded if a sampler orders them.
    Workers that persist are begun by the loader itself."""
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
    """Draws the seed of a DataLoader's workers, before its sampler draws its own: in each epoch,
    or once if the workers persist."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


@contextmanager
def random_state_of(state: Tensor) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        yield


def has_constant_batches(engine: Engine) -> bool:
    """Whether neither the global batch nor the micro-batch depends on the number of ranks."""
    config = engine.settings.config
    return None not in (config.train_batch_size, config.train_micro_batch_size_per_gpu)


def is_cut_by_sampler(loader: Any, micro_batch: int) -> bool:
    """Whether a loader's batches are micro-batches that a DistributedSampler orders."""
    own = type(loader.sampler) in (DistributedSampler, StreamSampler)
    own = own and type(loader.batch_sampler) is BatchSampler
    return own and loader.batch_size == micro_batch


def check_ranks(loader: Any, ranks: int) -> None:
    """Raises DataError if an iterable was read on another number of ranks: which samples it yields
    on a rank is known to the script alone."""
    if isinstance(loader.dataset, IterableDataset) and ranks != dist.get_world_size():
        raise DataError(
            f"the iterable dataset {type(loader.dataset).__name__} was read by {ranks} ranks, now "
            f"there are {dist.get_world_size()}: the script alone knows how to divide its rest",
            "as many ranks as at the beginning, where a DataLoader reads an iterable",
            f"the DataLoader's dataset: {way_out(loader.dataset)}",
        )


def cut_for(loader: Any, rank: int, ranks: int) -> None:
    """Makes a DistributedSampler cut for other ranks. The first batches of all are the same samples
    on any number of ranks: each takes every so manieth of one order."""
    sampler = loader.sampler
    samples = len(sampler.dataset)
    each = samples // ranks if sampler.drop_last else -(-samples // ranks)
    sampler.rank, sampler.num_replicas = rank, ranks
    sampler.num_samples, sampler.total_size = each, each * ranks
