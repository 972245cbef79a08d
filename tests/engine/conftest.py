"""Of all tests of the engine: what one draws does not depend on which ran before it."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def the_same_draws() -> None:
    torch.manual_seed(0)
