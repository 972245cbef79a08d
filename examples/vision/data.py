"""Scikit-learn's handwritten digits: 1,797 real images that come with the package."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

SIZE = 8  # pixels on a side
TEST_INTERVAL = 5  # every fifth image is held out


def load() -> tuple[TensorDataset, TensorDataset]:
    """Load (train, test): images of shape (1, SIZE, SIZE) in [0, 1], and labels from 0 to 9."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % TEST_INTERVAL == 0
    train, test = (TensorDataset(images[rows], labels[rows]) for rows in (~held_out, held_out))
    return train, test
