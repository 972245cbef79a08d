"""The section `rayzero.compression`: what DeepSpeed has no key for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rayzero.engine.config.fields import Count, Section


class CompressionConfig(Section):
    """How gradients travel between ranks."""

    gradients: Literal["none", "fp16", "bf16", "int8", "sign", "lowrank"] = Field(
        default="none",
        description="fp16, bf16: rounded; int8: eight bits a value, a scale a block; sign: one bit "
        "a value; lowrank: factors of every matrix (PowerSGD)",
    )
    block_size: Count | None = Field(
        default=None,
        multiple_of=32,
        description="values that share a scale; by default 256 with int8, 64 with sign",
    )
    rank: Count = Field(default=4, description="of lowrank's factors")
    error_feedback: bool | None = Field(
        default=None,
        description="add what was lost to the next gradients; always with sign and lowrank, by "
        "default not with the others",
    )
