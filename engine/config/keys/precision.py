"""Keys about dtypes."""

from __future__ import annotations

from rayzero.engine.config.keys.rows import IMPLEMENTED, NO_OP, REFUSED, Key

FP16 = (
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
        use="fp32 main weights, which offload_optimizer can keep in CPU memory",
    ),
)

BF16 = (
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
        use="fp32 main weights, which offload_optimizer can keep in CPU memory",
    ),
    Key(
        "bf16.bf16_optimizer_states",
        REFUSED,
        "optimizer state in bfloat16",
        use="fp32 state, which offload_optimizer can keep in CPU memory",
    ),
)

MIXED = (
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
        use="fp16 or bf16, or a model that was made in that dtype",
    ),
    Key(
        "data_types.buffer_dtype",
        REFUSED,
        "the dtype of the model's buffers",
        use="model.to, before initialize",
    ),
    Key(
        "data_types.keep_in_fp32_modules",
        REFUSED,
        "buffers that stay fp32 in 16-bit training",
        use="the default: buffers keep the dtype that the model gave them",
    ),
)
