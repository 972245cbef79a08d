"""The section `activation_checkpointing`: what is kept for backward."""

from __future__ import annotations

from rayzero.engine.config.fields import Natural, Section


class ActivationCheckpointingConfig(Section):
    """Options of `checkpointing.checkpoint`; they change nothing where it is not called."""

    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: Natural | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False
