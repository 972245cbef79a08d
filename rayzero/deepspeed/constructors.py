"""Names that transformers replaces around `zero.Init`, to keep it from changing buffers' dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Callable[..., Tensor]:
    """`fn` itself: constructors inside `zero.Init` keep the dtypes that they are given."""
    return fn


_orig_torch_arange = torch.arange
