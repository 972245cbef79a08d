"""Config keys that DeepSpeed does not have: the `rayzero` section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rayzero.engine.config.fields import (
    ConfigSection,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from rayzero.engine.config.keys import implemented


class CompressionConfig(ConfigSection):
    """Compression of gradients between ranks."""

    gradients: Literal["none", "fp16", "bf16", "int8", "sign", "lowrank"] = implemented(
        "none",
        "how gradients are encoded: none; fp16, bf16: rounded; int8: eight bits a value, a scale a "
        "block; sign: one bit a value; lowrank: factors of every matrix (PowerSGD)",
    )
    block_size: Annotated[PositiveInt, Field(multiple_of=32)] | None = implemented(
        None, "values that share a scale; by default 256 with int8, 64 with sign"
    )
    rank: PositiveInt = implemented(4, "rank of lowrank's factors")
    error_feedback: bool | None = implemented(
        None,
        "the error of the encoding is added to the next gradients; always with sign and lowrank, "
        "by default not with the others",
    )


class RayzeroConfig(ConfigSection):
    """Keys that DeepSpeed does not have."""

    unshard_modules: tuple[str, ...] = implemented(
        (),
        "class names of the modules gathered as one unit at stage 3; by default the elements of "
        "every ModuleList and Sequential",
        group="rayzero",
        old_names=("rayzero.unit_classes",),
    )
    unshard_min_numel: NonNegativeInt = implemented(
        1_000_000,
        "at stage 3, a module in no block that owns at least this many elements (an embedding, a "
        "head) is gathered on its own; 0: never",
    )
    reshard_after_forward: bool = implemented(
        True,
        "at stage 3, weights are released after forward and gathered again for backward; false: "
        "gathered once a step, and kept in memory",
    )
    gather_buffers: Annotated[PositiveInt, Field(ge=2)] = implemented(
        2,
        "buffers for gathered weights at stage 3: live units at once",
        old_names=("rayzero.slots",),
    )
    unused_gradients: Literal["zero", "none"] = implemented(
        "zero",
        "what a parameter gets that no rank used in a step, such as an expert. zero: a gradient of "
        "zeros, as in DeepSpeed: momentum and weight decay continue. none: as in PyTorch, neither "
        "it nor its optimizer state changes; steps that an optimizer counts (Adam's bias "
        "correction) continue",
    )
    other_optimizer_state: Literal["error", "reset"] = implemented(
        "error",
        "what becomes of a saved optimizer state that has other parts than this optimizer's, as "
        "of Adam for SGD. error: it is refused. reset: it is left out, with a warning, and the "
        "optimizer starts anew; weights, step and data continue",
    )
    reduce_each_micro_step: bool = implemented(
        True,
        "gradients are reduced into shards in every micro-step at stages 2 and 3; false: every "
        "rank accumulates all of them, as at stage 1, and they are reduced once a step, which "
        "costs the memory of the main gradients of the whole model (see `rayzero plan`)",
    )
    overlap_weight_gather: bool = implemented(
        False,
        "updated weights of stages 1 and 2 are gathered while the next forward runs; between "
        "`step()` and the end of that forward no weight may be read from outside the model, other "
        "than through the engine or after `engine.wait_weights()`, and none used in a forward "
        "before that of the module that holds it",
    )
    peak_flops: PositiveFloat | None = implemented(
        None,
        "peak flop/s of one device, for mfu; known for the usual GPUs. Flops are counted in the "
        "second micro-step, or with torch.compile estimated from the sizes of model and batch",
    )
    compression: CompressionConfig = CompressionConfig()
