"""Fixtures of the source code rules."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def disable_garbage_collection() -> Iterator[None]:
    """Python 3.11's `ast.parse` fails with "recursion depth mismatch" if a garbage collection in it
    runs finalizers of other tests' objects."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
