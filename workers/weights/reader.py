"""Copies the newest version of the trainer's weights into a model of another process."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
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
"""How often a waiting reader looks for a version or a copy from another node, and calls `check`."""
_TRY_AGAIN_S = 1.0  # wait after an error, unless there is a newer version before
_GONE = (SlotGoneError, SlotDamagedError, VaultGoneError)


class NoVersionError(RayzeroError):
    """No version of the trainer's weights could be read in time."""


class _Loaded(NamedTuple):
    """The version that a model holds, its engine, and the version's `WeightSource.constants`."""

    version: WeightVersion
    engine: str | None
    constants: tuple[object, ...] | None


class LentVersion(NamedTuple):
    """A version that other processes may read until the `read` of `WeightReader.lend` returns.

    Args:
        slots: the slots of all ranks.
        paths: the paths of the slots' buffers, which processes of this node and user may open.
    """

    version: WeightVersion
    slots: tuple[SlotRef, ...]
    paths: tuple[str, ...]


@dataclass(eq=False)
class WeightReader:
    """Reads versions of the weights into models of this process. Used by one thread.

    Slots are mapped read-only, and each range is copied to its place in the model. Slots of other
    nodes are copied to this node's vault first, once for all of its readers. If a slot is
    overwritten during a read, the reader starts over with the newest version. The trainer never
    waits for a reader, not even for a stopped one, and allocates nothing for it.

    Args:
        _find: returns the newest version that the controller has named; None if there is none yet.
        _vault: returns the connection to this node's vault; None if there is none at the moment.
        _check: called at the start of a read, and while it waits; raises to end the read.
        _limit_s: the longest wait for a version that can be read.
    """

    _find: Callable[[], WeightDirectory | None]
    _vault: Callable[[], VaultClient | None]
    _check: Callable[[], None]
    _limit_s: float
    _mappings: SlotMappings = field(default_factory=SlotMappings)
    _indexes: dict[int, BlockIndex] = field(default_factory=dict)
    _loaded: WeakKeyDictionary[nn.Module, _Loaded] = field(default_factory=WeakKeyDictionary)

    @property
    def newest(self) -> WeightVersion | None:
        """The newest version; None if there is none yet."""
        directory = self._find()
        return None if directory is None else directory.version

    def refresh(
        self, model: nn.Module, engine: str | None = None, least: tuple[int, int] = (0, 0)
    ) -> WeightVersion:
        """Copies the newest version into the model's parameters and persistent buffers, in place
        and cast to their dtypes, unless the model has that version. Waits for the first version.

        Constants, which training does not change, are read once. If this raises, the model may hold
        parts of several versions, until a later call has returned.

        Args:
            model: a model with the names and shapes of the trainer's model, on any device.
            engine: the name of one of several engines; None: the first one.
            least: waits for a version with at least this `WeightDirectory.progress`.

        Raises:
            CheckpointMismatchError: names or shapes differ.
            ConfigError: there is no engine of that name.
            NoVersionError: no version could be read within `limit_s`.
            VaultMemoryError: the node has too little memory for slots of other nodes.
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
        """Lends the newest version to other processes of this node and user, unless it is `loaded`.
        Waits for the first version.

        Args:
            read: called with the version; must raise if not all of it could be read. If slots were
                overwritten, `read` is called again with a newer version; otherwise its error is
                raised here.
            loaded: the version that the other processes have.
            least: as for `refresh`.

        Raises:
            NoVersionError, VaultMemoryError: as `refresh`.
        """
        return self._with_newest(
            lambda version: version == loaded, partial(self._lend, read), least
        )

    def _lend(
        self, read: Callable[[LentVersion], object], directory: WeightDirectory, deadline_s: float
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
                    image.verify()  # raises SlotGoneError if the slot was overwritten
                raise

    def _with_newest(
        self,
        is_loaded: Callable[[WeightVersion], bool],
        read: Callable[[WeightDirectory, float], object],
        least: tuple[int, int],
    ) -> WeightVersion:
        """Reads the newest version. Repeats that if the version is gone before it was read."""
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
        """Waits until there is another version, or it is time to try the same version again."""
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
                fix="set recovery.replicas, or let the role wait longer; if versions are "
                "overwritten before they are read, set a longer recovery.mirror_every",
            )
        sleep(POLL_S)

    def _read(
        self, model: nn.Module, engine: str | None, directory: WeightDirectory, deadline_s: float
    ) -> None:
        images = [self._map(ref, deadline_s) for ref in directory.slots]
        source = WeightSource(images, self._indexes)
        part = select_engine(source, engine)
        constants = source.constants()
        loaded = self._loaded.pop(model, None)  # not loaded any more if the read fails
        has_constants = (
            loaded is not None
            and constants is not None
            and (loaded.engine, loaded.constants) == (engine, constants)
        )
        _read_model(model, part, skip_constants=has_constants)
        source.verify_all()
        self._mappings.end_turn()
        used = {image.header.index_checksum for image in images}
        self._indexes = {key: index for key, index in self._indexes.items() if key in used}
        self._loaded[model] = _Loaded(directory.version, engine, constants)

    def _map(self, ref: SlotRef, deadline_s: float) -> WeightImage:
        fd = self._open(ref, deadline_s)
        try:
            return self._mappings.map(ref, fd)
        finally:
            os.close(fd)

    def _open(self, ref: SlotRef, deadline_s: float) -> int:
        """Returns a descriptor of the slot's buffer, which the caller closes. Waits while a slot of
        another node is copied to this node."""
        while True:
            vault = self._vault()
            if vault is None:
                raise VaultGoneError("this node has no vault at the moment")
            fd = vault.open_weights(ref)
            if fd is not None:
                return fd
            self._pause(deadline_s, f"{ref.describe()} is being copied to this node")


def select_engine(source: StateSource, engine: str | None) -> StateSource:
    """Returns the part of the source that belongs to an engine, by its name; None: the first
    engine. Raises ConfigError if there is no engine of that name."""
    is_first = engine is None or len(engines_of(source)) == 1
    found = find_part(source, engine, is_first=is_first)
    if found is None:
        raise ConfigError(
            f"weights of an engine {engine!r}",
            allowed=list_engines(source),
            fix="pass refresh(engine=...) the name in the trainer's initialize(name=...)",
        )
    return open_part(source, found)


def _read_model(model: nn.Module, source: StateSource, *, skip_constants: bool) -> None:
    """Copies the source into the model. Raises CheckpointMismatchError before any change."""
    held, constant = _held_tensors(source)
    ties = source.metadata(0).get("ties", {})
    targets = _targets(model, ties)
    own = {name: _logical(tensors[0]) for name, tensors in targets.items()}
    _check_fits(own, held)
    parts = list[StateRange]()
    copies = list[tuple[Tensor, Tensor]]()
    for name, tensors in targets.items():
        if name in held and not (skip_constants and name in constant):
            landing = tensors[0].detach().contiguous()  # a copy only if the memory format differs
            parts.append(whole_tensor_range(name, landing))
            others = [tensor for tensor in tensors if tensor.data_ptr() != landing.data_ptr()]
            copies += [(tensor, landing) for tensor in others]
    with torch.no_grad():
        read_ranges(parts, source)
        for target, landing in copies:
            target.copy_(landing)


def _held_tensors(source: StateSource) -> tuple[dict[str, LogicalTensor], set[str]]:
    """Returns the weights and buffers of a source, and the names of those that are constants."""
    held = dict[str, LogicalTensor]()
    changing = set[str]()
    for index in source.block_indexes:
        held |= {name: tensor for name, tensor in index.tensors.items() if is_weight(name)}
        for tensor_range in index.ranges:
            if tensor_range.offset >= index.constant_bytes:
                changing.add(tensor_range.name)
    return held, held.keys() - changing


def _targets(model: nn.Module, ties: Mapping[str, str]) -> dict[str, list[Tensor]]:
    """Returns the tensors of a model by their name in the state. A name has several tensors if they
    are tied in the trainer's model and separate in this one."""
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
    """Compares names and shapes. Raises CheckpointMismatchError if they differ. A buffer that the
    state lacks is no error: it keeps its value."""
    compared = {
        name: tensor for name, tensor in own.items() if name in held or name.startswith("weights/")
    }
    try:
        check_state_fits_model(compared, held)
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(
            error.seen.replace("saved state", "trainer's state"),
            allowed="a model with the names and shapes of the trainer's; dtypes may differ",
            fix="make the model as the training function does, or call refresh(model, engine=...)",
        ) from None
