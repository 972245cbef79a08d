"""Keys of the training step: batch sizes, optimizer, schedule, clipping, averaging."""

from __future__ import annotations

from rayzero.engine.config.keys.rows import IMPLEMENTED, NO_OP, REFUSED, Key

BATCHES = (
    Key("train_batch_size", IMPLEMENTED, "samples a step, over all ranks"),
    Key("train_micro_batch_size_per_gpu", IMPLEMENTED, "samples a micro-batch on one rank"),
    Key("gradient_accumulation_steps", IMPLEMENTED, "micro-batches a step on one rank"),
)

UPDATE = (
    Key("optimizer", IMPLEMENTED, "the optimizer, unless `initialize` is given one"),
    Key("optimizer.type", IMPLEMENTED, "its name, in any case"),
    Key("optimizer.params", IMPLEMENTED, "its arguments"),
    Key(
        "optimizer.legacy_fusion",
        NO_OP,
        "an older fused kernel",
        "optimizers step on flat buffers here, by torch's fused kernels",
    ),
    Key("scheduler", IMPLEMENTED, "the learning-rate schedule"),
    Key("scheduler.type", IMPLEMENTED, "its name, in any case"),
    Key("scheduler.params", IMPLEMENTED, "its arguments"),
    Key("gradient_clipping", IMPLEMENTED, "gradients are clipped to this L2 norm; 0: never"),
    Key(
        "prescale_gradients",
        REFUSED,
        "gradients are divided before they are summed over ranks",
    ),
    Key(
        "gradient_predivide_factor",
        REFUSED,
        "by what they are divided before the sum, the rest after it",
    ),
    Key("communication_data_type", REFUSED, "the dtype in which gradients travel"),
)

ACTIVATIONS = (
    Key(
        "activation_checkpointing.partition_activations",
        REFUSED,
        "checkpoints are cut over the ranks that work on one sample",
        "every rank works on samples of its own: there is no model parallelism to cut them over",
        "checkpointing.checkpoint without it",
    ),
    Key("activation_checkpointing.cpu_checkpointing", REFUSED, "checkpoints rest in CPU memory"),
    Key(
        "activation_checkpointing.contiguous_memory_optimization",
        NO_OP,
        "checkpoints lie behind one another in a buffer",
        "torch's caching allocator reuses their memory from step to step",
    ),
    Key(
        "activation_checkpointing.number_checkpoints",
        NO_OP,
        "how many checkpoints that buffer holds",
        "there is no such buffer",
    ),
    Key(
        "activation_checkpointing.synchronize_checkpoint_boundary",
        NO_OP,
        "the device is waited for at each checkpoint",
        "it would change no result, only cost time",
    ),
    Key(
        "activation_checkpointing.profile",
        NO_OP,
        "forward and backward of each checkpoint are timed",
        "torch.profiler shows them",
    ),
)

OURS = (
    Key(
        "rayzero.unit_classes",
        IMPLEMENTED,
        "class names of the modules gathered as one unit at stage 3; by default the elements of "
        "every ModuleList and Sequential",
    ),
    Key("rayzero.slots", IMPLEMENTED, "units of weights that may be live at once at stage 3"),
)
