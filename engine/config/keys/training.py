"""Rows of batch, optimizer, schedule, precision.

Keys of the training step: batch sizes, optimizer, schedule, clipping, averaging.

Keys about dtypes.
"""

from __future__ import annotations

from rayzero.engine.config.keys.spec import IMPLEMENTED, NO_OP, REFUSED, Key, is_set

BATCH_KEYS = (
    Key("train_batch_size", IMPLEMENTED, "samples a step, over all ranks"),
    Key("train_micro_batch_size_per_gpu", IMPLEMENTED, "samples a micro-batch on one rank"),
    Key("gradient_accumulation_steps", IMPLEMENTED, "micro-batches a step on one rank"),
    Key(
        "managed_gradient_accumulation",
        REFUSED,
        "false: step() ends a step whenever it is called",
        "the global batch would depend on the script, and a resumed run could not know it",
        "gradient_accumulation_steps, or no_sync()",
        is_active=lambda value: value not in (None, True, "auto"),
    ),
)

UPDATE_KEYS = (
    Key("optimizer", IMPLEMENTED, "the optimizer, unless `initialize` is given one"),
    Key("optimizer.type", IMPLEMENTED, "its name, in any case"),
    Key("optimizer.params", IMPLEMENTED, "its arguments"),
    Key(
        "optimizer.params.max_grad_norm",
        REFUSED,
        "gradients are clipped by the optimizer",
        "DeepSpeed does not take it either",
        "gradient_clipping",
        is_active=is_set,
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
        is_active=lambda value: str(value).lower() not in ("none", "auto", "mean"),
    ),
    Key(
        "communication_data_type",
        IMPLEMENTED,
        "the dtype in which gradients travel; sums are taken in that of main grads, which is the "
        "default",
    ),
)

ACTIVATION_KEYS = (
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

RAYZERO_KEYS = (
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

FP16_KEYS = (
    Key("fp16.enabled", IMPLEMENTED, "float16 weights with fp32 main weights and a scaled loss"),
    Key(
        "fp16.auto_cast",
        IMPLEMENTED,
        "the model's floating-point inputs are cast to float16; without it they stay as they are",
    ),
    Key("fp16.loss_scale", IMPLEMENTED, "the factor of the loss; 0: found while training"),
    Key("fp16.initial_scale_power", IMPLEMENTED, "a dynamic scale begins at 2 to this power"),
    Key("fp16.loss_scale_window", IMPLEMENTED, "steps without overflow after which it is doubled"),
    Key("fp16.hysteresis", IMPLEMENTED, "overflows that are borne before it is halved"),
    Key(
        "fp16.consecutive_hysteresis",
        IMPLEMENTED,
        "a step without overflow makes that count start anew",
    ),
    Key("fp16.min_loss_scale", IMPLEMENTED, "a dynamic scale does not go below this"),
    Key(
        "fp16.fp16_master_weights_and_grads",
        REFUSED,
        "main weights and main grads in float16 as well",
        "an update smaller than a two-thousandth of a weight would be lost",
        alternative="fp32 main weights, which offload_optimizer can keep in CPU memory",
    ),
)

BF16_KEYS = (
    Key("bf16.enabled", IMPLEMENTED, "bfloat16 weights with fp32 main weights"),
    Key(
        "bf16.immediate_grad_update",
        NO_OP,
        "a gradient is added to the main grad as soon as it is there",
        "always so here",
    ),
    Key(
        "bf16.check_grad_overflow",
        NO_OP,
        "a step with an inf or nan in its gradient is skipped",
        "always so here: it travels with the gradient norm and costs nothing",
    ),
    Key(
        "bf16.bf16_master_weights_and_grads",
        REFUSED,
        "main weights and main grads in bfloat16 as well",
        alternative="fp32 main weights, which offload_optimizer can keep in CPU memory",
    ),
    Key(
        "bf16.bf16_optimizer_states",
        REFUSED,
        "optimizer state in bfloat16",
        alternative="fp32 state, which offload_optimizer can keep in CPU memory",
    ),
)

OTHER_DTYPE_KEYS = (
    Key("torch_autocast.enabled", IMPLEMENTED, "`torch.autocast` around the model's forward"),
    Key("torch_autocast.dtype", IMPLEMENTED, "the dtype that autocast computes in"),
    Key(
        "torch_autocast.lower_precision_safe_modules",
        NO_OP,
        "classes of modules whose gradients and weights travel in that dtype",
        "weights travel as they are, and all gradients in communication_data_type",
    ),
    Key("data_types.grad_accum_dtype", IMPLEMENTED, "the dtype that gradients are summed up in"),
    Key(
        "data_types.param_dtype",
        REFUSED,
        "the dtype of the model's weights, whatever the precision",
        alternative="fp16 or bf16, or a model that was made in that dtype",
    ),
    Key(
        "data_types.buffer_dtype",
        REFUSED,
        "the dtype of the model's buffers",
        alternative="model.to, before initialize",
    ),
    Key(
        "data_types.keep_in_fp32_modules",
        REFUSED,
        "buffers that stay fp32 in 16-bit training",
        alternative="the default: buffers keep the dtype that the model gave them",
    ),
)
