"""Error feedback: what coding lost of a gradient is added to the next one (Seide et al. 2014;
Karimireddy et al. 2019). It is training state: over all ranks, it adds up to the gradient that has
not been applied yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Feedback:
    """What one unit's codes have lost so far on this rank.

    Attributes:
        of_terms: of this rank's gradients, in the unit's flat layout.
        of_sum: of the sum of this rank's shard, where sums are coded too; else None.
    """

    of_terms: Tensor
    of_sum: Tensor | None = None

    def forget(self) -> None:
        """A step was skipped: what is not finite must not come back."""
        self.of_terms.zero_()
        if self.of_sum is not None:
            self.of_sum.zero_()

    def scale(self, factor: float) -> None:
        """The gradients that are still to come are of another scale."""
        self.of_terms.mul_(factor)
        if self.of_sum is not None:
            self.of_sum.mul_(factor)

    @property
    def nbytes(self) -> int:
        return self.of_terms.nbytes + (0 if self.of_sum is None else self.of_sum.nbytes)
