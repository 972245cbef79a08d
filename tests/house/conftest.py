"""Tests of the house read every file's syntax tree."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def nothing_is_collected() -> Iterator[None]:
    """Python 3.11's `ast.parse` fails with "recursion depth mismatch" where another test's garbage
    runs code of its own in the middle of it, such as a task that logs at its end. What a file of
    these tests leaves is little."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
