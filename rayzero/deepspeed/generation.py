"""`unwrap_model_for_generation`, and what transformers replaces around `zero.Init`, to keep it from
changing buffers' dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.api.params import GatheredParameters

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Callable[..., Tensor]:
    """`fn` itself: constructors inside `zero.Init` keep the dtypes that they are given."""
    return fn


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Around generation by an engine: at stage 3 its weights are gathered once, instead of in every
    forward, and ranks may generate different lengths. Collective at its beginning."""
    offload = getattr(model.optimizer, "parameter_offload", None)  # at stage 3 only
    with GatheredParameters(list(model.parameters())):
        if offload is not None:
            offload.remove()
        try:
            yield model
        finally:
            if offload is not None:
                offload._register_deepspeed_module(offload.module)
