"""The params of each optimizer, as data, with DeepSpeed's names and defaults.

What is built of them is in `engine/optim`. A param that asks for nothing here is taken and told as
such; one that cannot be had is refused with what to use instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from rayzero.engine.config.fields import (
    ConfigSection,
    NonNegativeFloat,
    PositiveInt,
    parse_number,
    reject_bool,
)

Beta: TypeAlias = Annotated[
    float,
    BeforeValidator(parse_number),
    BeforeValidator(reject_bool),
    Field(ge=0.0, lt=1.0, strict=True),
]
Betas: TypeAlias = tuple[Beta, Beta]


def _require_value(allowed: Any, reason: str) -> AfterValidator:
    """Takes one value and refuses any other."""

    def check(value: Any) -> Any:
        if value != allowed:
            raise ValueError(f"refused: {reason}")
        return value

    return AfterValidator(check)


def _refuse_if_set(reason: str) -> Callable[[Any], Any]:
    """Takes what asks for nothing (null, false, 0) and refuses the rest."""

    def check(value: Any) -> Any:
        if value:
            raise ValueError(f"refused: {reason}")
        return None

    return check


MustBeUnset: TypeAlias = Annotated[
    None, BeforeValidator(_refuse_if_set("clipping is the engine's: use gradient_clipping"))
]
StateInMainDtype: TypeAlias = Annotated[
    bool,
    _require_value(
        True, "optimizer state has the dtype of main weights, which is fp32 in 16-bit runs"
    ),
]


class OptimizerParams(ConfigSection):
    """What each of them may be given."""

    max_grad_norm: MustBeUnset = None
    set_grad_none: bool = True  # no-op: gradients lie in buffers of the engine
    fp32_optimizer_states: StateInMainDtype = True  # no-op: so it is


class TorchParams(OptimizerParams):
    """Of those that torch has: how it runs them. By default by its fused kernel."""

    lr: NonNegativeFloat = 1e-3
    fused: bool | None = None
    foreach: bool | None = None
    maximize: bool = False


class AdamParams(TorchParams):
    """Adam's and AdamW's. Adam is AdamW unless `adam_w_mode` is false, as in DeepSpeed.

    `torch_adam` takes torch's default weight decay, 0.01 for AdamW, in place of DeepSpeed's 0.
    """

    weight_decay: NonNegativeFloat | None = None
    betas: Betas = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-8
    bias_correction: bool = True
    adam_w_mode: bool = True
    torch_adam: bool = False
    amsgrad: bool = False


class SGDParams(TorchParams):
    weight_decay: NonNegativeFloat = 0.0
    momentum: NonNegativeFloat = 0.0
    dampening: NonNegativeFloat = 0.0
    nesterov: bool = False


class AdagradParams(TorchParams):
    lr: NonNegativeFloat = 1e-2
    weight_decay: NonNegativeFloat = 0.0
    lr_decay: NonNegativeFloat = 0.0
    initial_accumulator_value: NonNegativeFloat = 0.0
    eps: NonNegativeFloat = 1e-10


class LionParams(OptimizerParams):
    lr: NonNegativeFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.0
    betas: Betas = (0.9, 0.999)


class LambParams(OptimizerParams):
    """`max_coeff` and `min_coeff` bound the trust ratio of each parameter."""

    lr: NonNegativeFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.0
    bias_correction: bool = True
    betas: Betas = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-8
    eps_inside_sqrt: bool = False
    max_coeff: NonNegativeFloat = 10.0
    min_coeff: NonNegativeFloat = 0.01
    amsgrad: Annotated[
        None, BeforeValidator(_refuse_if_set("LAMB has no AMSGrad variant: use AdamW with amsgrad"))
    ] = None


class MuonParams(OptimizerParams):
    """Matrices are Muon's; embeddings, the head and vectors are Adam's (`betas`, `eps`).

    `muon_lr` and `adam_lr` default to `lr`, and that to each half's usual rate. `nesterov`,
    `ns_steps` and `adjust_lr_fn` are torch.optim.Muon's.
    """

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
    torch_adam: bool = False  # no-op: Adam's half is torch's fused kernel
    per_head_muon: Annotated[
        None,
        BeforeValidator(
            _refuse_if_set("matrices are orthogonalised whole, not by attention heads")
        ),
    ] = None


class OneBitAdamParams(OptimizerParams):
    """1-bit Adam's; stage 0. Weight decay is decoupled, and there is no bias correction.

    `freeze_step` steps learn variances; they should outlast the schedule's warm-up.
    """

    lr: NonNegativeFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.0
    betas: Betas = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-8
    freeze_step: PositiveInt = 100_000
    bias_correction: bool = True  # no-op: the paper's update has none
    cuda_aware: bool = False  # no-op: the backend is that of all collectives
    comm_backend_name: str = "nccl"  # no-op
    amsgrad: Annotated[
        None, BeforeValidator(_refuse_if_set("variances are frozen here: use AdamW with amsgrad"))
    ] = None


OPTIMIZER_PARAMS: dict[str, type[OptimizerParams]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "SGD": SGDParams,
    "Adagrad": AdagradParams,
    "Lion": LionParams,
    "Lamb": LambParams,
    "Muon": MuonParams,
    "OneBitAdam": OneBitAdamParams,
}
TORCH_OPTIMIZERS = ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
"""Those of torch.optim that work element by element; torch checks their arguments."""

OPTIMIZERS = (*OPTIMIZER_PARAMS, *TORCH_OPTIMIZERS)
"""All that `optimizer.type` may name, in any case. A dotted name is a class to be imported."""

REFUSED_OPTIMIZERS = {
    "ZeroOneAdam": "it is not in this version: use OneBitAdam",
    "OneBitLamb": "it is not in this version: use OneBitAdam, or Lamb",
    "MuAdam": "width scaling is the mup package's: use initialize(optimizer=mup.MuAdam(...))",
    "MuAdamW": "width scaling is the mup package's: use initialize(optimizer=mup.MuAdamW(...))",
    "MuSGD": "width scaling is the mup package's: use initialize(optimizer=mup.MuSGD(...))",
    "LBFGS": "its step needs the whole model and several losses: use AdamW or Muon",
    "Adafactor": "it factors moments over whole matrices: use Lion, which keeps one moment",
    "SparseAdam": "gradients are dense here: use AdamW",
}
