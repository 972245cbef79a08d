"""`EngineWeightSource`: an engine's weights for vLLM's own backends of weight transfer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import ParamMeta, WeightSource

from rayzero.engine.errors import EngineError
from rayzero.engine.layout.packed import is_packed


class EngineWeightSource(WeightSource):
    """A `WeightSource` of an engine's parameters: their names, dtypes and shapes, and the full
    parameters, gathered unit by unit, at every ZeRO stage.

    Every rank makes a source and iterates it to the end, in `send_weights()`, between two steps.

    Args:
        engine: the engine of `ctx.initialize` or `rayzero.initialize`, or a `rayzero.Engine`.
        dtype: the dtype in which floating-point values are sent, such as that of vLLM's model; by
            default the model's own.

    Raises:
        EngineError: a parameter is quantized.

    Example:
        >>> trainer = WeightTransferTrainerFactory.trainer_init(
        ...     init_info=NCCLTrainerInitInfo(address, port, world_size, rank=engine.rank),
        ...     client=HTTPVLLMWeightSyncClient("http://generator:8000"),
        ...     source=EngineWeightSource(engine),
        ... )
        >>> trainer.send_weights()
    """

    def __init__(self, engine: Any, dtype: torch.dtype | None = None) -> None:
        self._engine = engine
        self._dtype = dtype
        for name, param in engine.module.named_parameters():
            if is_packed(param):
                raise EngineError(
                    f"{name} is quantized: vLLM loads weights as they are before quantization",
                    allowed="a model of floating-point weights",
                    fix="load the model without quantization_config, and give vLLM `quantization`",
                )

    def metadata(self) -> list[ParamMeta]:
        """Returns name, dtype and full shape of each parameter, in the order of the iteration.
        Gathers nothing."""
        return [
            ParamMeta(name, self._dtype or param.dtype, tuple(param.shape))
            for name, param in self._engine.module.named_parameters()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, full tensor on the engine's device). Collective. Raises CollectiveError if
        a rank is lost meanwhile."""
        for name, value in self._engine.iterate_params():
            yield name, value if self._dtype is None else value.to(self._dtype)
