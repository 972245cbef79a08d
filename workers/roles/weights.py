"""`ctx.weights` of a role's function."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from torch import nn

from rayzero.workers.roles.reporter import RoleReporter
from rayzero.workers.weights.directory import WeightVersion
from rayzero.workers.weights.reader import LentVersion, WeightReader


class RoleWeights:
    """The versions of the trainer's weights. Each version is a step that all ranks have mirrored.

    Args:
        least: returns the argument `least` of `WeightReader.refresh`.
    """

    def __init__(
        self, reader: WeightReader, reporter: RoleReporter, least: Callable[[], tuple[int, int]]
    ) -> None:
        self.reader = reader
        self._reporter = reporter
        self._least = least

    @property
    def newest(self) -> WeightVersion | None:
        """The newest version; None if there is none yet."""
        return self.reader.newest

    def refresh(self, model: nn.Module, engine: str | None = None) -> WeightVersion:
        """Brings a model to the newest version, in place: see `WeightReader.refresh`. The version
        is at least as new as the one published when the worker last took a task."""
        return self._timed(lambda: self.reader.refresh(model, engine, self._least()))

    def lend(
        self, read: Callable[[LentVersion], object], loaded: WeightVersion | None = None
    ) -> WeightVersion:
        """Lends the newest version to other processes of this node: see `WeightReader.lend`."""
        return self._timed(lambda: self.reader.lend(read, loaded, self._least()))

    def _timed(self, refresh: Callable[[], WeightVersion]) -> WeightVersion:
        began_s = monotonic()
        version = refresh()
        self._reporter.add_refresh(version.step, monotonic() - began_s)
        return version
