"""Keys of the training step: batch sizes, optimizer, schedule, clipping, averaging."""

from __future__ import annotations

from rayzero.engine.config.keys.rows import IMPLEMENTED, NO_OP, REFUSED, Key, given

BATCHES = (
    Key("train_batch_size", IMPLEMENTED, "samples a step, over all ranks"),
    Key("train_micro_batch_size_per_gpu", IMPLEMENTED, "samples a micro-batch on one rank"),
    Key("gradient_accumulation_steps", IMPLEMENTED, "micro-batches a step on one rank"),
    Key(
        "managed_gradient_accumulation",
        REFUSED,
        "false: step() ends a step whenever it is called",
        "the global batch would depend on the script, and a resumed run could not know it",
        "gradient_accumulation_steps, or no_sync()",
        asks=lambda value: value not in (None, True, "auto"),
    ),
)

UPDATE = (
    Key("optimizer", IMPLEMENTED, "the optimizer, unless `initialize` is given one"),
    Key("optimizer.type", IMPLEMENTED, "its name, in any case"),
    Key("optimizer.params", IMPLEMENTED, "its arguments"),
    Key(
        "optimizer.params.max_grad_norm",
        REFUSED,
        "gradients are clipped by the optimizer",
        "DeepSpeed does not take it either",
        "gradient_clipping",
        asks=given,
    ),
    Key(
        "optimizer.legacy_fusion",
        NO_OP,
        "an older fused kernel",
        "optimizers step on flat buffers here, by torch's fused kernels",
    ),
    Key("scheduler", IMPLEMENTED, "the learning-rate schedule"),
    Key("scheduler.type", IMPLEMENTED, "its name, in any case"),
    Key("scheduler.params", IMPLEMENTED, "its arguments"),
    Key(
        "gradient_clipping",
        IMPLEMENTED,
        "gradients are clipped to this L2 norm, 1.0 by default; 0: never",
    ),
    Key(
        "prescale_gradients",
        IMPLEMENTED,
        "gradients are divided before they are summed over ranks",
    ),
    Key(
        "gradient_predivide_factor",
        IMPLEMENTED,
        "by what they are divided before the sum, the rest after it",
    ),
    Key(
        "gradient_allreduce_op",
        REFUSED,
        "whether gradients are averaged or summed over the ranks",
        "a sum would make the step depend on how many ranks there are",
        "the mean, and a larger learning rate or loss",
        asks=lambda value: str(value).lower() not in ("none", "auto", "mean"),
    ),
    Key(
        "communication_data_type",
        IMPLEMENTED,
        "the dtype in which gradients travel; sums are taken in that of main grads, which is the "
        "default",
    ),
)

ACTIVATIONS = (
    Key(
        "activation_checkpointing.partition_activations",
        NO_OP,
        "checkpoints are cut over model-parallel ranks",
        "every rank works on samples of its own, so there is nobody to cut them over",
    ),
    Key(
        "activation_checkpointing.cpu_checkpointing",
        IMPLEMENTED,
        "checkpoints rest in CPU memory, once checkpointing.configure was given the config",
    ),
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
    Key(
        "rayzero.peak_flops",
        IMPLEMENTED,
        "flops a second that one device could do, for mfu; known for the usual GPUs",
    ),
    Key("rayzero.slots", IMPLEMENTED, "units of weights that may be live at once at stage 3"),
    Key(
        "rayzero.compression.gradients",
        IMPLEMENTED,
        "how gradients travel: none, fp16, bf16, int8, sign (one bit), lowrank (PowerSGD)",
    ),
    Key(
        "rayzero.compression.block_size",
        IMPLEMENTED,
        "values that share a scale; by default 256 with int8, 64 with sign",
    ),
    Key("rayzero.compression.rank", IMPLEMENTED, "of lowrank's factors"),
    Key(
        "rayzero.compression.error_feedback",
        IMPLEMENTED,
        "what coding loses is added to the next gradients; always with sign and lowrank",
    ),
)
