"""Raises an error when it is imported."""

from __future__ import annotations


def helper(ctx: object) -> int:
    return 1 // 0


VALUE = helper(None)
