"""Sections about dtypes: fp16, bf16, torch_autocast, data_types."""

from __future__ import annotations

from rayzero.engine.config.fields import (
    ConfigSection,
    DtypeName,
    Integer,
    NonNegativeFloat,
    PositiveInt,
)
from rayzero.engine.config.keys import Auto, implemented, no_op, refused

_AUTO_ENABLED = "the default of transformers' TrainingArguments; set true to train in"


class Fp16Config(ConfigSection):
    """float16 model weights with fp32 main weights and a scaled loss."""

    enabled: bool = implemented(
        False,
        "float16 weights with fp32 main weights and a scaled loss",
        group="fp16",
        auto=Auto(False, f"{_AUTO_ENABLED} fp16"),
    )
    auto_cast: bool = implemented(
        False, "the model's floating-point inputs are cast to float16; otherwise they are unchanged"
    )
    loss_scale: NonNegativeFloat = implemented(0.0, "static loss scale; 0: dynamic")
    initial_scale_power: Integer = implemented(16, "a dynamic scale starts at 2 to this power")
    loss_scale_window: PositiveInt = implemented(
        1000, "steps without overflow after which the scale is doubled"
    )
    hysteresis: PositiveInt = implemented(2, "overflows tolerated before the scale is halved")
    consecutive_hysteresis: bool = implemented(
        False, "a step without overflow resets the hysteresis"
    )
    min_loss_scale: NonNegativeFloat = implemented(1.0, "lower bound of a dynamic scale")
    fp16_master_weights_and_grads: bool = refused(
        False,
        "main weights and main grads in float16 too",
        "an update smaller than a two-thousandth of a weight would be lost",
        alternative="fp32 main weights, which offload_optimizer can keep in CPU memory",
    )


class Bf16Config(ConfigSection):
    """bfloat16 model weights with fp32 main weights, gradients and optimizer state."""

    enabled: bool = implemented(
        False,
        "bfloat16 weights with fp32 main weights",
        group="bf16",
        auto=Auto(False, f"{_AUTO_ENABLED} bf16"),
    )
    immediate_grad_update: bool = no_op(
        False, "a gradient is added to the main grad as soon as it is ready", "always done"
    )
    check_grad_overflow: bool = no_op(
        True,
        "a step with an inf or nan in its gradient is skipped",
        "always done: the check is reduced together with the gradient norm and costs nothing",
        old_names=("bf16.check_overflow",),
    )
    bf16_master_weights_and_grads: bool = refused(
        False,
        "main weights and main grads in bfloat16 too",
        alternative="fp32 main weights, which offload_optimizer can keep in CPU memory",
    )
    bf16_optimizer_states: bool = refused(
        False,
        "optimizer state in bfloat16",
        alternative="fp32 state, with offload_optimizer if needed",
    )


class TorchAutocastConfig(ConfigSection):
    """`torch.autocast` around the model's forward; weights keep their dtype."""

    enabled: bool = implemented(
        False, "`torch.autocast` around the model's forward", group="other dtypes"
    )
    dtype: DtypeName = implemented("bf16", "the dtype that autocast computes in")
    lower_precision_safe_modules: tuple[str, ...] | None = no_op(
        None,
        "classes of modules whose gradients and weights are communicated in that dtype",
        "weights are communicated in their own dtype, all gradients in communication_data_type",
    )


class DataTypesConfig(ConfigSection):
    """Dtypes other than the model weights'; None for the default of the precision."""

    grad_accum_dtype: DtypeName | None = implemented(
        None, "the dtype in which gradients are accumulated", group="other dtypes"
    )
    param_dtype: DtypeName | None = refused(
        None,
        "the dtype of the model's weights, whatever the precision",
        alternative="fp16 or bf16, or a model that was built in that dtype",
    )
    buffer_dtype: DtypeName | None = refused(
        None, "the dtype of the model's buffers", alternative="model.to, before initialize"
    )
    keep_in_fp32_modules: str | tuple[str, ...] = refused(
        "auto",
        "buffers that stay fp32 in 16-bit training",
        alternative="the default: buffers keep the dtype that the model gave them",
    )
