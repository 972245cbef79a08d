"""How main weights relate to model weights. One object a run, chosen in `factory`.

| policy | model weights | main weights | main grads | loss scale |
|---|---|---|---|---|
| Native | the model's own dtype | the same memory | the same dtype | none |
| Mixed, bf16 | bfloat16 | fp32, from the original values | fp32 | none |
| Mixed, fp16 | float16 | fp32, from the original values | fp32 | dynamic or fixed |
| Autocast | the model's own dtype | the same memory | the same dtype | fp16: dynamic |

Main grads have another dtype where `data_types.grad_accum_dtype` says so. Sums over ranks and
micro-steps are rounded to it term by term; the optimizer reads them in the main weights' dtype.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rayzero.engine.precision.casting import cast_floats
from rayzero.engine.precision.loss_scale import UNSCALED, Scaler


class Precision(Protocol):
    """The dtype decisions of a run.

    Attributes:
        average_first: whether gradients are averaged by the seed of backward, which costs nothing,
            or only when the optimizer uses them, which keeps a weight such as 1/3 from being
            rounded to the precision of the model.
        scaler: what the loss is multiplied by, and gradients are divided by in the optimizer.
    """

    @property
    def average_first(self) -> bool: ...

    @property
    def scaler(self) -> Scaler: ...

    def model_dtype(self, original: torch.dtype) -> torch.dtype:
        """The dtype that forward uses a tensor in."""

    def main_dtype(self, original: torch.dtype) -> torch.dtype:
        """The dtype of main weights and optimizer state."""

    def grad_dtype(self, original: torch.dtype) -> torch.dtype:
        """The dtype that main grads rest, travel and are summed in."""

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        """The main weights for a range of model weights; may be the same memory."""

    def publish(self, main_weights: Tensor, model_weights: Tensor) -> None:
        """After an update: makes the model weights follow the main weights."""

    def cast_inputs(self, value: Any) -> Any:
        """The model's inputs in the dtype of its weights."""

    def around_forward(self) -> AbstractContextManager[Any]:
        """What the model's forward runs in."""


@dataclass(frozen=True)
class Native:
    """The model trains in the dtype it came in. Model weights and main weights are one tensor."""

    scaler: Scaler = UNSCALED
    average_first: bool = True
    accumulate_in: torch.dtype | None = None

    def model_dtype(self, original: torch.dtype) -> torch.dtype:
        return original

    def main_dtype(self, original: torch.dtype) -> torch.dtype:
        return original

    def grad_dtype(self, original: torch.dtype) -> torch.dtype:
        return original if original.is_complex else self.accumulate_in or original

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        return model_weights

    def publish(self, main_weights: Tensor, model_weights: Tensor) -> None:
        return

    def cast_inputs(self, value: Any) -> Any:
        return value

    def around_forward(self) -> AbstractContextManager[Any]:
        return nullcontext()


@dataclass(frozen=True)
class Autocast(Native):
    """The model keeps its dtype; torch picks one for each operation of forward, and its gradient.

    Attributes:
        device_type: "cpu" or "cuda".
        dtype: of the operations that are safe in 16 bits.
    """

    average_first: bool = False
    device_type: str = "cpu"
    dtype: torch.dtype = torch.bfloat16

    def around_forward(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=self.dtype)


@dataclass(frozen=True)
class Mixed:
    """Forward and backward in 16 bits, sums and updates in fp32 (Micikevicius et al., 2018).

    Attributes:
        dtype: of model weights: bfloat16 or float16.
        casts_inputs: whether floating-point inputs are cast as well.
    """

    dtype: torch.dtype
    scaler: Scaler = UNSCALED
    casts_inputs: bool = True
    average_first: bool = False
    accumulate_in: torch.dtype | None = None

    def model_dtype(self, original: torch.dtype) -> torch.dtype:
        return self.dtype if original.is_floating_point else original

    def main_dtype(self, original: torch.dtype) -> torch.dtype:
        return torch.float32

    def grad_dtype(self, original: torch.dtype) -> torch.dtype:
        return self.accumulate_in or torch.float32

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        return original.to(torch.float32, copy=True)

    def publish(self, main_weights: Tensor, model_weights: Tensor) -> None:
        model_weights.copy_(main_weights)

    def cast_inputs(self, value: Any) -> Any:
        return cast_floats(value, self.dtype) if self.casts_inputs else value

    def around_forward(self) -> AbstractContextManager[Any]:
        return nullcontext()
