"""Optimizers that `optimizer.type` may name: one row each, with DeepSpeed's params and defaults.

To add an optimizer, write its class in `engine/optim`, a row here, and a line in
`docs/optimizers.md`. A row names the class or function that is called as
`implementation(groups, **params.arguments())`. A param marked `NO_EFFECT` is accepted and not
passed on. An unsupported param is refused, with a message that names the alternative.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from rayzero.engine.config.fields import FiniteFloat, NonNegativeFloat, PositiveInt, StrictModel
from rayzero.engine.config.keys import REFUSED, Key

log = logging.getLogger("rayzero.engine")

Beta: TypeAlias = Annotated[FiniteFloat, Field(ge=0.0, lt=1.0)]
Betas: TypeAlias = tuple[Beta, Beta]

NO_EFFECT = "accepted for compatibility and not passed to the implementation"


def _refuse_if_set(reason: str) -> BeforeValidator:
    """Returns a validator that accepts only values that turn the param off (null, false, 0)."""

    def check(value: Any) -> None:
        if value:
            raise ValueError(f"refused: {reason}")

    return BeforeValidator(check)


class OptimizerParams(StrictModel):
    """The params that all optimizers have in common."""

    # Dotted name of the class, or of a function that makes an instance.
    implementation: ClassVar[str]
    # Dotted name of a function `(model, groups, params) -> ParamGroups` for an optimizer that
    # treats some parameters differently; empty for none.
    group_splitter: ClassVar[str] = ""

    max_grad_norm: Annotated[Any, NO_EFFECT] = Field(
        default=None,
        json_schema_extra=Key(
            REFUSED,
            "gradients are clipped by the optimizer",
            "DeepSpeed rejects it too",
            alternative="gradient_clipping",
            group="optimizer, schedule, gradients",
        ),
    )
    # Gradients live in buffers of the engine; state has the dtype of main weights.
    set_grad_none: Annotated[bool, NO_EFFECT] = True
    fp32_optimizer_states: Annotated[bool, NO_EFFECT] = True

    def arguments(self) -> dict[str, Any]:
        """Returns keyword arguments for the implementation: every param that is set and has an
        effect."""
        fields = type(self).model_fields.items()
        values = {
            key: getattr(self, key) for key, field in fields if NO_EFFECT not in field.metadata
        }
        return {key: value for key, value in values.items() if value is not None}


class TorchParams(OptimizerParams):
    """Params of torch's own optimizers, which run their fused kernel by default."""

    lr: NonNegativeFloat = 1e-3
    fused: bool | None = None
    foreach: bool | None = None
    maximize: bool = False

    def arguments(self) -> dict[str, Any]:
        fused = not self.foreach if self.fused is None else self.fused
        return super().arguments() | {"fused": fused}


class AdamParams(TorchParams):
    """Adam, which is AdamW unless `adam_w_mode` is false, as in DeepSpeed.

    `torch_adam` selects torch's default weight decay, 0.01 for AdamW, in place of DeepSpeed's 0.
    """

    implementation = "rayzero.engine.optim.optimizers.make_adam"

    weight_decay: NonNegativeFloat | None = None
    betas: Betas = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-8
    bias_correction: bool = True
    adam_w_mode: bool = True
    torch_adam: bool = False
    amsgrad: bool = False


class AdamWParams(AdamParams):
    """AdamW, whatever `adam_w_mode` says."""

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"adam_w_mode": True}


class SGDParams(TorchParams):
    implementation = "torch.optim.SGD"

    weight_decay: NonNegativeFloat = 0.0
    momentum: NonNegativeFloat = 0.0
    dampening: NonNegativeFloat = 0.0
    nesterov: bool = False


class AdagradParams(TorchParams):
    implementation = "torch.optim.Adagrad"

    lr: NonNegativeFloat = 1e-2
    weight_decay: NonNegativeFloat = 0.0
    lr_decay: NonNegativeFloat = 0.0
    initial_accumulator_value: NonNegativeFloat = 0.0
    eps: NonNegativeFloat = 1e-10


class LionParams(OptimizerParams):
    implementation = "rayzero.engine.optim.optimizers.Lion"

    lr: NonNegativeFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.0
    betas: Betas = (0.9, 0.999)


class LambParams(OptimizerParams):
    """LAMB. `max_coeff` and `min_coeff` bound the trust ratio of each parameter. `eps` is added to
    the root of the second moment or, with `eps_inside_sqrt`, under the root. The trust ratio uses
    the norm of the update with weight decay."""

    implementation = "rayzero.engine.optim.optimizers.Lamb"

    lr: NonNegativeFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.0
    bias_correction: bool = True
    betas: Betas = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-8
    eps_inside_sqrt: bool = False
    max_coeff: NonNegativeFloat = 10.0
    min_coeff: NonNegativeFloat = 0.01
    amsgrad: Annotated[
        None, _refuse_if_set("LAMB has no AMSGrad variant: use AdamW with amsgrad")
    ] = None


class MuonParams(OptimizerParams):
    """Muon for matrices; Adam (`betas`, `eps`) for embeddings, the head and vectors.

    `muon_lr` and `adam_lr` default to `lr`, which defaults to the usual rate of each algorithm.
    `nesterov`, `ns_steps` and `adjust_lr_fn` are torch.optim.Muon's.
    """

    implementation = "rayzero.engine.optim.muon.Muon"
    group_splitter = "rayzero.engine.optim.param_groups.split_muon_groups"

    lr: NonNegativeFloat | None = None
    muon_lr: NonNegativeFloat | None = None
    adam_lr: NonNegativeFloat | None = None
    weight_decay: NonNegativeFloat = 0.0
    momentum: Beta = 0.95
    nesterov: bool = True
    ns_method: Literal["gram", "standard"] = "gram"
    ns_steps: Annotated[PositiveInt, Field(lt=100)] = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    betas: Betas = (0.9, 0.95)
    eps: NonNegativeFloat = 1e-10
    adam_w_mode: bool = True
    torch_adam: bool = False  # no effect: Adam is torch's fused kernel
    per_head_muon: Annotated[
        None, _refuse_if_set("matrices are orthogonalized as a whole, not per attention head")
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Returns only `decoupled`: `split_muon_groups` puts all other params into the options of
        the groups."""
        return {"decoupled": self.adam_w_mode}


class OneBitAdamParams(OptimizerParams):
    """1-bit Adam, stage 0 only. Weight decay is decoupled, and there is no bias correction.

    Variances are learned for `freeze_step` steps, which should outlast the schedule's warm-up.
    """

    implementation = "rayzero.engine.optim.onebit.OneBitAdam"

    lr: NonNegativeFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.0
    betas: Betas = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-8
    freeze_step: PositiveInt = 100_000
    bias_correction: Annotated[bool, NO_EFFECT] = True  # the paper's update has none
    # The backend is that of all collectives.
    cuda_aware: Annotated[bool, NO_EFFECT] = False
    comm_backend_name: Annotated[str, NO_EFFECT] = "nccl"
    amsgrad: Annotated[
        None, _refuse_if_set("variances are frozen here: use AdamW with amsgrad")
    ] = None


class ZeroOneAdamParams(OneBitAdamParams):
    """0/1 Adam, stage 0 only. Momenta are reduced as signs from the second step on. The first
    `var_update_scaler` updates of the variances are one step apart, the next are as many two steps
    apart, then four, and so on until `var_freeze_step`."""

    implementation = "rayzero.engine.optim.onebit.ZeroOneAdam"

    freeze_step: Annotated[
        None, _refuse_if_set("0/1 Adam's variances freeze after var_freeze_step")
    ] = None  # type: ignore[assignment]
    var_freeze_step: PositiveInt = 100_000
    var_update_scaler: PositiveInt = 16
    # Every step is synchronized: local steps would leave ranks with different weights, which no
    # repair could continue from.
    local_step_scaler: Annotated[PositiveInt, NO_EFFECT] = 32_678
    local_step_clipper: Annotated[PositiveInt, NO_EFFECT] = 16

    def arguments(self) -> dict[str, Any]:
        if given := sorted({"local_step_scaler", "local_step_clipper"} & self.model_fields_set):
            log.warning("optimizer.params: no effect: %s: every step is synchronized", given)
        return super().arguments()


class OneBitLambParams(LambParams):
    """1-bit LAMB, stage 0 only: LAMB without bias correction for `freeze_step` steps, then frozen
    variances. `coeff_beta` averages the trust ratios of these first steps. Afterwards a factor
    adapts the averages: `factor_min` and `factor_max` bound it, `factor_threshold` its change in
    a step."""

    implementation = "rayzero.engine.optim.onebit.OneBitLamb"

    bias_correction: Annotated[bool, NO_EFFECT] = True  # the paper's update has none
    eps_inside_sqrt: Annotated[None, _refuse_if_set("1-bit LAMB adds eps to the root")] = None  # type: ignore[assignment]
    freeze_step: PositiveInt = 100_000
    coeff_beta: Beta = 0.9
    factor_max: NonNegativeFloat = 4.0
    factor_min: NonNegativeFloat = 0.5
    factor_threshold: NonNegativeFloat = 0.1
    cuda_aware: Annotated[bool, NO_EFFECT] = False
    comm_backend_name: Annotated[str, NO_EFFECT] = "nccl"


OPTIMIZER_PARAMS: dict[str, type[OptimizerParams]] = {
    "Adam": AdamParams,
    "AdamW": AdamWParams,
    "SGD": SGDParams,
    "Adagrad": AdagradParams,
    "Lion": LionParams,
    "Lamb": LambParams,
    "Muon": MuonParams,
    "OneBitAdam": OneBitAdamParams,
    "ZeroOneAdam": ZeroOneAdamParams,
    "OneBitLamb": OneBitLambParams,
}
ONEBIT_OPTIMIZERS = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
"""Optimizers whose momenta are reduced as signs."""

TORCH_OPTIMIZERS = ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
"""Elementwise optimizers of torch.optim, whose arguments torch checks."""

OPTIMIZERS = (*OPTIMIZER_PARAMS, *TORCH_OPTIMIZERS)
"""Values of `optimizer.type`, in any case; it may also be the dotted name of a class."""

REFUSED_OPTIMIZERS = {
    "MuAdam": "width scaling is the mup package's: use initialize(optimizer=mup.MuAdam(...))",
    "MuAdamW": "width scaling is the mup package's: use initialize(optimizer=mup.MuAdamW(...))",
    "MuSGD": "width scaling is the mup package's: use initialize(optimizer=mup.MuSGD(...))",
    "LBFGS": "its step needs the whole model and several losses: use AdamW or Muon",
    "Adafactor": "torch's factors moments over whole matrices: use transformers.Adafactor",
    "SparseAdam": "gradients are dense here: use AdamW",
}
