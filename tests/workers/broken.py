"""Cannot be imported: there is a mistake inside."""

from __future__ import annotations


def helper() -> int:
    return 1 // 0


VALUE = helper()
