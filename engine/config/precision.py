"""The sections about dtypes: what weights, gradients and sums are kept in, and what travels."""

from __future__ import annotations

from rayzero.engine.config.fields import Count, Dtype, Integer, Number, Section


class Fp16Config(Section):
    """float16 model weights with fp32 main weights and a scaled loss."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: Number = 0.0  # 0: dynamic
    initial_scale_power: Integer = 16
    loss_scale_window: Count = 1000
    hysteresis: Count = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Number = 1.0
    fp16_master_weights_and_grads: bool = False


class Bf16Config(Section):
    """bfloat16 model weights with fp32 main weights, gradients and optimizer state."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class TorchAutocastConfig(Section):
    """`torch.autocast` around the model's forward; weights stay as they are."""

    enabled: bool = False
    dtype: Dtype = "bf16"
    lower_precision_safe_modules: tuple[str, ...] | None = None


class DataTypesConfig(Section):
    """Dtypes of what is not a model weight; None for what the precision brings with it."""

    grad_accum_dtype: Dtype | None = None
    param_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None
    keep_in_fp32_modules: str | tuple[str, ...] = "auto"
