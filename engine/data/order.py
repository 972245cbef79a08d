"""The global order of samples: a pure function of (seed, epoch, sample cursor), in O(1) memory.

An epoch is a keyed bijection of [0, n), computed sample by sample instead of shuffled in memory:
a balanced Feistel network (Luby and Rackoff 1988) over the smallest domain of an even number of
bits that holds n, with cycle walking (Black and Rogaway 2002, "Ciphers with Arbitrary Finite
Domains") to stay inside [0, n): what lands outside is enciphered again, which takes four turns on
average at the very worst. Keys and rounds are mixed by the finaliser of splitmix64 (Steele, Lea
and Flood 2014). That makes a good shuffle, not cryptography.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rayzero.engine.errors import DataError

_ROUNDS = 8  # four make a pseudorandom permutation of a large domain; small ones need a few more
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK_64 = (1 << 64) - 1


class SampleOrder:
    """The order in which the samples of a dataset are consumed, epoch after epoch.

    A *position* is a sample cursor: the ever-growing count of samples consumed before this one.
    Its epoch is `position // length`, and every epoch holds every sample exactly once.

    Args:
        length: samples in the dataset, 1 or more.
        seed: any integer; its low 64 bits count.

    Raises:
        DataError: the dataset is empty.
    """

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise DataError(
                f"the training data holds {length} samples",
                "at least one sample",
                "the dataset given as training_data",
            )
        self.length = length
        self.seed = seed
        self._half_bits = np.uint64(max(1, ((length - 1).bit_length() + 1) // 2))
        self._half_mask = np.uint64((1 << int(self._half_bits)) - 1)

    def index(self, position: int) -> int:
        """The dataset index of the sample at `position` (0 or more)."""
        return int(self.indices(position, 1)[0])

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """The dataset indices at positions `start` to `start + count - 1`, across epochs.

        Returns:
            int64, shape (count,), each in [0, length).
        """
        positions = np.arange(start, start + count, dtype=np.uint64)
        epochs, values = np.divmod(positions, np.uint64(self.length))
        seeds = np.full(1, self.seed & _MASK_64, dtype=np.uint64)
        keys = _mixed(_mixed(seeds) ^ epochs)
        values = self._enciphered(values, keys)
        while (outside := np.flatnonzero(values >= np.uint64(self.length))).size:
            values[outside] = self._enciphered(values[outside], keys[outside])
        return values.astype(np.int64)

    def _enciphered(
        self, values: NDArray[np.uint64], keys: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        """One pass of the Feistel network: a bijection of the whole domain for every key."""
        left, right = values >> self._half_bits, values & self._half_mask
        for _ in range(_ROUNDS):
            keys = keys + _GOLDEN
            left, right = right, left ^ (_mixed(keys ^ right) & self._half_mask)
        return (left << self._half_bits) | right


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: a bijection of 64-bit words in which every bit moves every other."""
    words = words + _GOLDEN  # arrays of uint64 wrap around, which is what is wanted
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
