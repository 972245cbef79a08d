"""Bounded number types for files that others may have written or damaged: every valid value can be
displayed."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

MAX_COUNT = 2**63
MAX_UNIX_S = 4e9  # in the year 2096

Count: TypeAlias = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Amount: TypeAlias = Annotated[float, Field(ge=-MAX_COUNT, le=MAX_COUNT)]
"""Seconds, bytes, rates, shares."""
UnixTime: TypeAlias = Annotated[float, Field(ge=0, le=MAX_UNIX_S)]
