"""Images of two handwritten digits beside each other, and captions that name them in order."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from examples.vision import data as digits

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = (
    "{left} then {right}",
    "a {right} after a {left}",
    "on the left {left} and on the right {right}",
    "{right} on the right of {left}",
    "the numbers {left} {right}",
)
WORDS = sorted({word for text in (*TEMPLATES, *NAMES) for word in text.split() if "{" not in word})
LENGTH = max(len(text.split()) for text in TEMPLATES)  # words of a caption, padded by token 0


def load(train_pairs: int, test_pairs: int) -> tuple[TensorDataset, TensorDataset]:
    """Make (train, test) from the training and the held-out digits, the same at every call.

    Each has images (1, 8, 16), captions as tokens (LENGTH,), and labels (): 10 * left + right.
    """
    train, test = digits.load()
    return _pairs(train, train_pairs, seed=0), _pairs(test, test_pairs, seed=1)


def encode(text: str) -> list[int]:
    """The tokens of a caption: the numbers of its words, from 1, padded to LENGTH."""
    tokens = [1 + WORDS.index(word) for word in text.split()]
    return tokens + [0] * (LENGTH - len(tokens))


def all_captions(template: str = TEMPLATES[0]) -> Tensor:
    """The 100 captions of one template, by label. Returns tokens (100, LENGTH)."""
    texts = [template.format(left=left, right=right) for left in NAMES for right in NAMES]
    return torch.tensor([encode(text) for text in texts])


def _pairs(dataset: TensorDataset, count: int, seed: int) -> TensorDataset:
    images, names = dataset.tensors
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randint(len(images), (2, count), generator=generator)
    template = torch.randint(len(TEMPLATES), (count,), generator=generator)
    captions = torch.stack([all_captions(text) for text in TEMPLATES])
    labels = 10 * names[left] + names[right]
    return TensorDataset(
        torch.cat([images[left], images[right]], dim=3), captions[template, labels], labels
    )
