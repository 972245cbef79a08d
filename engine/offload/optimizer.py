"""The local optimizer where state rests elsewhere: an update goes piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import Tensor

from rayzero.engine.offload.home import Home, Piece
from rayzero.engine.offload.place import Place
from rayzero.engine.optim.local import LocalOptimizer, Run


class PiecewiseOptimizer(LocalOptimizer):
    """Steps the torch optimizer once a piece, with that piece's runs as its only parameters.

    What is on the device is one piece, and comes first: a GPU works on it while the CPU goes on.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, runs: Sequence[Run]) -> None:
        super().__init__(optimizer, runs)
        homes = {id(run.unit.home): run.unit.home for run in runs}.values()
        self._rounds = [
            (home, _cut(home, [run for run in runs if run.unit.home is home]))
            for home in sorted(homes, key=lambda home: home.place is not Place.DEVICE)
        ]

    def step(self, factor: float) -> None:
        with self._narrowing():
            for home, parts in self._rounds:
                pieces = [_piece(runs) for runs in parts]
                for number in home.rounds(pieces, self.torch.state):
                    self._narrow(parts[number])
                    self.update(parts[number], factor)

    @contextmanager
    def _narrowing(self) -> Iterator[None]:
        """Afterwards the torch optimizer has all of its parameters again."""
        whole = [group["params"] for group in self.torch.param_groups]
        try:
            yield
        finally:
            for group, params in zip(self.torch.param_groups, whole, strict=True):
                group["params"] = params

    def _narrow(self, runs: Sequence[Run]) -> None:
        for number, group in enumerate(self.torch.param_groups):
            group["params"] = [run.weight for run in runs if run.group == number]


def optimizer_class(runs: Sequence[Run]) -> type[LocalOptimizer]:
    """Piecewise where anything rests elsewhere than on the device."""
    moved = any(run.unit.home.place is not Place.DEVICE for run in runs)
    return PiecewiseOptimizer if moved else LocalOptimizer


def _cut(home: Home, runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that are updated together: a unit's, and no more elements than the home has room for."""
    if home.place is Place.DEVICE:
        return [list(runs)]
    found: list[list[Run]] = []
    for _, unit in groupby(runs, key=lambda run: id(run.unit)):
        room = 0
        for number, run in enumerate(unit):
            numel = run.weight.numel()
            if not number or (home.piece_numel is not None and numel > room):
                found.append([])
                room = home.piece_numel or 0
            found[-1].append(run)
            room -= numel
    return found


def _piece(runs: Sequence[Run]) -> Piece:
    main = runs[0].unit.main
    if main is None:
        raise RuntimeError("a frozen unit has no runs")
    return Piece(main, tuple(run.weight for run in runs), tuple(_target(run) for run in runs))


def _target(run: Run) -> Tensor:
    """The model weights that follow a run."""
    unit = run.unit
    start = unit.owned.start
    return unit.weights.part(unit.owned)[run.extent.start - start : run.extent.stop - start]
