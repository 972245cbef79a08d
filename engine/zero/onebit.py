"""The wire of 1-bit Adam (Tang et al. 2021): gradients in the warm-up, then momenta as signs.

All ranks have the same momentum m of the step before. Each makes its own next one from its own
gradient, and these travel as signs with error feedback, as gradients do with the sign codec. What
arrives is the next momentum of all; the optimizer is handed the gradient that leads there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rayzero.engine.comm.codecs.codec import Codec
from rayzero.engine.comm.coded import CodedSums
from rayzero.engine.comm.collectives import Collectives, Pending, Sums
from rayzero.engine.comm.pending import Then
from rayzero.engine.optim.local import LocalOptimizer, Run
from rayzero.engine.optim.onebit import OneBitAdam
from rayzero.engine.zero.unit import Unit
from rayzero.engine.zero.ways import CodedWay, Kept


@dataclass
class Momenta:
    """The optimizer's momenta, known once it has been made.

    Attributes:
        factor: what summed gradients are multiplied by on their way into momenta; it goes with the
            loss scale, which momenta do not have.
    """

    factor: float
    optimizer: OneBitAdam | None = None
    runs: dict[str, list[Run]] = field(default_factory=dict)  # by the unit's name

    def of(self, unit: Unit) -> list[tuple[slice, Tensor, float]]:
        """(extent, momentum, beta) of every run of a unit that is past its warm-up; none before."""
        if self.optimizer is None:
            return []
        betas = [group["betas"][0] for group in self.optimizer.param_groups]
        return [
            (run.extent, self.optimizer.state[run.weight]["exp_avg"], betas[run.group])
            for run in self.runs.get(unit.name, ())
            if self.optimizer.frozen(run.weight)
        ]


class OneBitSums:
    """One unit's gradients, or momenta. See `Sums`; for stage 0, which all-reduces.

    Args:
        coded: sums as signs.
    """

    def __init__(
        self, coded: CodedSums, collectives: Collectives, unit: Unit, momenta: Momenta
    ) -> None:
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self._coded = coded
        self._collectives = collectives
        self._unit = unit
        self._momenta = momenta

    def all_reduce(self, full: Tensor) -> Pending:
        momenta = self._momenta.of(self._unit)
        if not momenta:
            return self._collectives.all_reduce(full)
        factor = self._momenta.factor
        for extent, average, beta in momenta:
            # The ranks' terms add up to the next momentum, before it is multiplied by the factor.
            part = full[extent].mul_(1.0 - beta)
            part.add_(average.to(part.device), alpha=beta / (factor * self.world_size))

        def as_gradient() -> None:
            for extent, average, beta in momenta:
                part = full[extent].sub_(average.to(full.device), alpha=beta / factor)
                part.div_(1.0 - beta)

        return Then(self._coded.all_reduce(full), as_gradient)

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool = False) -> Pending:
        return self._coded.reduce_scatter(full, out, accumulate=accumulate)


class OneBitWay:
    """Gradients travel as they are, and once variances are frozen, momenta as signs."""

    def __init__(
        self, codec: Codec, collectives: Collectives, device: torch.device, *, factor: float
    ) -> None:
        self._collectives = collectives
        self._momenta = Momenta(factor)
        self._coded = CodedWay(codec, collectives, device, feedback=True, factor=factor)

    @property
    def factor(self) -> float:
        return self._coded.factor

    @property
    def kept(self) -> list[Kept]:
        return self._coded.kept

    @property
    def buffer_bytes(self) -> int:
        return self._coded.buffer_bytes

    def shared(self) -> Iterator[tuple[str, Tensor]]:
        yield from ()

    def sums(self, unit: Unit) -> Sums:
        coded = self._coded.coded(unit)
        return OneBitSums(coded, self._collectives, unit, self._momenta)

    def follow(self, optimizer: LocalOptimizer) -> None:
        """The optimizer whose momenta travel."""
        if isinstance(optimizer.torch, OneBitAdam):
            self._momenta.optimizer = optimizer.torch
            for run in optimizer.runs:
                self._momenta.runs.setdefault(run.unit.name, []).append(run)

    def forget(self) -> None:
        self._coded.forget()

    def rescale(self, ratio: float) -> None:
        self._coded.rescale(ratio)
        self._momenta.factor = self._coded.factor
