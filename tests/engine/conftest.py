"""Fixtures of all engine tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seed_rng() -> None:
    """Make random numbers independent of the order of tests."""
    torch.manual_seed(0)
