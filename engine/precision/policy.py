"""How main weights relate to model weights. One object a run, chosen in `factory`.

| policy | model weights | main weights | main grads |
|---|---|---|---|
| Native | the model's own dtype | the same memory | the same dtype |
| Bf16 | bfloat16 | fp32, from the original values | fp32 |
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Protocol

import torch
from torch import Tensor


class Precision(Protocol):
    """The dtype decisions of a run.

    Attributes:
        average_first: whether gradients are averaged by the seed of backward, which costs nothing,
            or only when the optimizer uses them, which keeps a weight such as 1/3 from being
            rounded to the precision of the model.
    """

    average_first: bool

    def model_dtype(self, original: torch.dtype) -> torch.dtype:
        """The dtype that forward uses a tensor in."""

    def main_dtype(self, original: torch.dtype) -> torch.dtype:
        """The dtype of main weights, main grads and optimizer state."""

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        """The main weights for a range of model weights; may be the same memory."""

    def publish(self, main_weights: Tensor, model_weights: Tensor) -> None:
        """After an update: makes the model weights follow the main weights."""

    def cast_inputs(self, value: Any) -> Any:
        """The model's inputs in the dtype of its weights."""


class Native:
    """The model trains in the dtype it came in. Model weights and main weights are one tensor."""

    average_first = True

    def model_dtype(self, original: torch.dtype) -> torch.dtype:
        return original

    def main_dtype(self, original: torch.dtype) -> torch.dtype:
        return original

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        return model_weights

    def publish(self, main_weights: Tensor, model_weights: Tensor) -> None:
        return

    def cast_inputs(self, value: Any) -> Any:
        return value


class Bf16:
    """Forward and backward in bfloat16, sums and updates in fp32 (Micikevicius et al., 2018)."""

    average_first = False

    def model_dtype(self, original: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if original.is_floating_point else original

    def main_dtype(self, original: torch.dtype) -> torch.dtype:
        return torch.float32

    def main_weights(self, original: Tensor, model_weights: Tensor) -> Tensor:
        return original.to(torch.float32, copy=True)

    def publish(self, main_weights: Tensor, model_weights: Tensor) -> None:
        model_weights.copy_(main_weights)

    def cast_inputs(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(torch.bfloat16) if value.is_floating_point() else value
        if isinstance(value, dict):
            cast = copy.copy(value)  # a subclass may know more than its items
            cast.update({key: self.cast_inputs(one) for key, one in value.items()})
            return cast
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.cast_inputs(one) for one in value))
        if isinstance(value, list | tuple):
            return type(value)(self.cast_inputs(one) for one in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {
                one.name: self.cast_inputs(getattr(value, one.name))
                for one in dataclasses.fields(value)
                if one.init
            }
            return dataclasses.replace(value, **fields)
        return value
