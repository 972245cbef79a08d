"""`deepspeed.runtime.zero.unwrap_model_for_generation`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rayzero.engine.api.params import GatheredParameters


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
