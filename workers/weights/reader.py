"""Brings a model of another process to the newest version of the trainer's weights."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from time import monotonic, sleep
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rayzero.engine.checkpoint.errors import CheckpointMismatchError, check_state_fits_model
from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.engine.layout.engine_parts import (
    engines_of,
    find_part,
    is_weight,
    list_engines,
    open_part,
)
from rayzero.engine.layout.state_index import BlockIndex, LogicalTensor, StateSource
from rayzero.engine.precision.dtypes import dtype_name
from rayzero.engine.state.ranges import (
    StateRange,
    persistent_buffers,
    read_ranges,
    whole_tensor_range,
)
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.records import SlotDamagedError, SlotGoneError, SlotRef, VaultGoneError
from rayzero.workers.weights.directory import WeightDirectory, WeightVersion
from rayzero.workers.weights.images import SlotMappings, WeightImage, WeightSource

log = logging.getLogger("rayzero.workers")

POLL_S = 0.005
"""How often a reader that waits looks for a version, for a copy from another node, and whether it
is to end."""
_TRY_AGAIN_S = 1.0  # after an error, unless there is a newer version before
_GONE = (SlotGoneError, SlotDamagedError, VaultGoneError)


class NoVersionError(RayzeroError):
    """No version of the trainer's weights could be read in time."""


class _Loaded(NamedTuple):
    """The content of a model: a version of an engine's weights, with the slots' `constants`."""

    version: WeightVersion
    engine: str | None
    constants: tuple[object, ...] | None


class LentVersion(NamedTuple):
    """A version that other processes may read, as long as `WeightReader.lend` calls its function.

    Args:
        slots: of all ranks.
        paths: of their buffers, which processes of this node and user may open.
    """

    version: WeightVersion
    slots: tuple[SlotRef, ...]
    paths: tuple[str, ...]


class WeightReader:
    """Reads versions of the weights into models of this process. Used by one thread.

    Slots are mapped read-only and copied from, each range to where the model has it; those of other
    nodes are copied to this node's vault first, once for all of its readers. A slot that is
    overwritten meanwhile is given up for the newest version: the trainer never waits for a reader,
    also not for one that was stopped, and allocates nothing for it.

    Args:
        find: the newest version, as far as the controller has said; None: none yet.
        vault: the connection to this node's vault; None: there is none at the moment.
        check: called with each read, and while it waits: raises to end it.
        limit_s: the longest wait for a version that can be read.
    """

    def __init__(
        self,
        find: Callable[[], WeightDirectory | None],
        vault: Callable[[], VaultClient | None],
        check: Callable[[], None],
        limit_s: float,
    ) -> None:
        self._find = find
        self._vault = vault
        self._check = check
        self._limit_s = limit_s
        self._mappings = SlotMappings()
        self._indexes: dict[int, BlockIndex] = {}
        self._loaded: WeakKeyDictionary[nn.Module, _Loaded] = WeakKeyDictionary()

    @property
    def newest(self) -> WeightVersion | None:
        """The newest version; None: there is none yet."""
        directory = self._find()
        return None if directory is None else directory.version

    def refresh(
        self, model: nn.Module, engine: str | None = None, least: tuple[int, int] = (0, 0)
    ) -> WeightVersion:
        """Copies the newest version into the model's parameters and persistent buffers, in place
        and cast to their dtypes; nothing if the model has it. Waits for the first version.

        What training does not change is read once. If this raises, the model may have parts of
        several versions, until a later call has returned.

        Args:
            model: with the names and shapes of the trainer's, on any device.
            engine: the name of one of several engines; None: the first one.
            least: waits for a version of at least that `WeightDirectory.progress`.

        Raises:
            CheckpointMismatchError: names or shapes differ.
            ConfigError: there is no engine of that name.
            NoVersionError: no version could be read within `limit_s`.
            VaultMemoryError: the node has no room for those of other nodes.
        """
        return self._with_newest(
            lambda version: self._loaded.get(model, (None,))[:2] == (version, engine),
            partial(self._read, model, engine),
            least,
        )

    def lend(
        self,
        read: Callable[[LentVersion], object],
        loaded: WeightVersion | None = None,
        least: tuple[int, int] = (0, 0),
    ) -> WeightVersion:
        """Has other processes of this node and user read the newest version; nothing if it is
        `loaded`. Waits for the first version.

        Args:
            read: called with the version. Raises if what was read is not all of it, and is then
                called with a newer one, if slots were overwritten; otherwise that is raised here.
            least: as of `refresh`.

        Raises:
            NoVersionError, VaultMemoryError: as `refresh`.
        """
        return self._with_newest(
            lambda version: version == loaded, partial(self._lend, read), least
        )

    def _lend(
        self,
        read: Callable[[LentVersion], object],
        directory: WeightDirectory,
        deadline_s: float,
    ) -> None:
        with ExitStack() as stack:
            images, paths = [], []
            for ref in directory.slots:
                fd = self._open(ref, deadline_s)
                stack.callback(os.close, fd)
                images.append(self._mappings.map(ref, fd))
                paths.append(f"/proc/{os.getpid()}/fd/{fd}")
            try:
                read(LentVersion(directory.version, directory.slots, tuple(paths)))
            except Exception:
                for image in images:
                    image.verify()  # SlotGoneError, where that was the reason
                raise

    def _with_newest(
        self,
        is_loaded: Callable[[WeightVersion], bool],
        read: Callable[[WeightDirectory, float], object],
        least: tuple[int, int],
    ) -> WeightVersion:
        """Reads the newest version, or a newer one if it is gone before it was read."""
        self._check()
        deadline_s = monotonic() + self._limit_s
        reason = "the trainer has mirrored no step yet"
        while True:
            directory = self._find()
            if directory is not None and directory.progress < least:
                reason = f"step {least[1]} is awaited, the newest version is {directory.version}"
            elif directory is not None:
                if is_loaded(directory.version):
                    return directory.version
                try:
                    read(directory, deadline_s)
                    return directory.version
                except _GONE as error:
                    log.debug("%s", error)
                    reason = error.seen
            self._await_other(directory, deadline_s, reason)

    def _await_other(self, before: WeightDirectory | None, deadline_s: float, reason: str) -> None:
        """Returns once there is another version, or it is time to try the same one again."""
        again_s = monotonic() + _TRY_AGAIN_S
        while self._find() == before and monotonic() < again_s:
            self._pause(deadline_s, reason)

    def _pause(self, deadline_s: float, reason: str) -> None:
        self._check()
        if monotonic() > deadline_s:
            raise NoVersionError(
                f"no version of the trainer's weights could be read for {self._limit_s:g} s: "
                + reason,
                allowed="a job whose ranks train, and mirror their state (recovery.replicas: 1)",
                fix="recovery.replicas, or the time that the role may wait; if versions are "
                "overwritten before they are here, a longer recovery.mirror_every",
            )
        sleep(POLL_S)

    def _read(
        self, model: nn.Module, engine: str | None, directory: WeightDirectory, deadline_s: float
    ) -> None:
        images = [self._map(ref, deadline_s) for ref in directory.slots]
        source = WeightSource(images, self._indexes)
        part = select_engine(source, engine)
        constants, before = source.constants(), self._loaded.pop(model, None)
        has_constants = (
            before is not None
            and constants is not None
            and (before.engine, before.constants) == (engine, constants)
        )
        _read_model(model, part, skip_constants=has_constants)
        source.verify_all()
        self._mappings.end_turn()
        used = {image.header.index_checksum for image in images}
        self._indexes = {key: it for key, it in self._indexes.items() if key in used}
        self._loaded[model] = _Loaded(directory.version, engine, constants)

    def _map(self, ref: SlotRef, deadline_s: float) -> WeightImage:
        fd = self._open(ref, deadline_s)
        try:
            return self._mappings.map(ref, fd)
        finally:
            os.close(fd)

    def _open(self, ref: SlotRef, deadline_s: float) -> int:
        """A descriptor, which the caller closes. Waits for a copy of what is on another node."""
        while True:
            if (vault := self._vault()) is None:
                raise VaultGoneError("this node has no vault at the moment")
            if (fd := vault.open_weights(ref)) is not None:
                return fd
            self._pause(deadline_s, f"{ref.describe()} is being copied to this node")


def select_engine(source: StateSource, engine: str | None) -> StateSource:
    """The part of an engine, by its name; None: of the first one. Raises ConfigError if there is
    none of that name."""
    is_first = engine is None or len(engines_of(source)) == 1
    found = find_part(source, engine, is_first=is_first)
    if found is None:
        raise ConfigError(
            f"weights of an engine {engine!r}",
            allowed=list_engines(source),
            fix="refresh(model, engine=...), or the name in the trainer's initialize(name=...)",
        )
    return open_part(source, found)


def _read_model(model: nn.Module, source: StateSource, *, skip_constants: bool) -> None:
    """Raises CheckpointMismatchError before anything is changed."""
    held, constant = _held_tensors(source)
    ties = source.metadata(0).get("ties", {})
    targets = _targets(model, ties)
    own = {name: _logical(tensors[0]) for name, tensors in targets.items()}
    _check_fits(own, held)
    parts = list[StateRange]()
    copies = list[tuple[Tensor, Tensor]]()
    for name, tensors in targets.items():
        if name in held and not (skip_constants and name in constant):
            landing = tensors[0].detach().contiguous()  # itself, but for another memory format
            parts.append(whole_tensor_range(name, landing))
            copies += [(it, landing) for it in tensors if it.data_ptr() != landing.data_ptr()]
    with torch.no_grad():
        read_ranges(parts, source)
        for target, landing in copies:
            target.copy_(landing)


def _held_tensors(source: StateSource) -> tuple[dict[str, LogicalTensor], set[str]]:
    """The weights and buffers of a source, and which of them training never changes."""
    held = dict[str, LogicalTensor]()
    changing = set[str]()
    for index in source.block_indexes:
        held |= {name: it for name, it in index.tensors.items() if is_weight(name)}
        changing |= {it.name for it in index.ranges if it.offset >= index.constant_bytes}
    return held, held.keys() - changing


def _targets(model: nn.Module, ties: Mapping[str, str]) -> dict[str, list[Tensor]]:
    """The tensors of a model by the name that they have in the state: several, if the trainer's
    model has one tensor there."""
    found = defaultdict[str, list[Tensor]](list)
    seen = set[int]()
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) not in seen:
            seen.add(id(param))
            found[f"weights/{ties.get(name, name)}"].append(param)
    return found | {f"buffers/{name}": [buffer] for name, buffer in persistent_buffers(model)}


def _logical(tensor: Tensor) -> LogicalTensor:
    return LogicalTensor(dtype_name(tensor.dtype), tuple(tensor.shape))


def _check_fits(own: Mapping[str, LogicalTensor], held: Mapping[str, LogicalTensor]) -> None:
    """Compares names and shapes; a buffer that the state lacks keeps its value."""
    try:
        check_state_fits_model(
            {name: it for name, it in own.items() if name in held or name.startswith("weights/")},
            held,
        )
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(
            error.seen.replace("saved state", "trainer's state"),
            allowed="a model with the names and shapes of the trainer's; dtypes may differ",
            fix="make the model as the training function does, or refresh(model, engine=...)",
        ) from None
