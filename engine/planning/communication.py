"""Bytes of compression and secondary partitions on one rank, computed from the layout.

Payload buffers are allocated on demand, so their number depends on how many reductions are in
flight. That is simulated with the engine's `PayloadBuffers` on the meta device.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from rayzero.engine.comm.backend import CompletedWork
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.compression.codecs import Codec
from rayzero.engine.compression.powersgd import basis_numel, factor_buffer_numels
from rayzero.engine.compression.quantized import MAX_IN_FLIGHT, PayloadBuffers
from rayzero.engine.compression.select import (
    GradientCompression,
    hpz_group_size,
    resolve_compression,
    weight_codec,
)
from rayzero.engine.config import EngineConfig
from rayzero.engine.layout.units import UnitPlan
from rayzero.engine.precision.policy import Precision
from rayzero.engine.zero.placement import Placement, Stage

_SIMULATED_PASSES = 3  # buffers grow in the first two


def communication_bytes(
    plans: Sequence[UnitPlan],
    config: EngineConfig,
    stage: Stage,
    precision: Precision,
    world_size: int,
    grad_slots: int,
) -> Counter[str]:
    """error_feedback, second_shards, and the staging buffers of encoded payloads.

    Raises:
        ConfigError: the config's compression is not supported.
    """
    sizes: Counter[str] = Counter()
    trained = [plan for plan in plans if plan.trainable]
    dtypes = [precision.grad_dtype(plan.params[0].dtype) for plan in trained]
    asked = resolve_compression(config)
    for plan, dtype in zip(trained, dtypes, strict=True):
        sizes["error_feedback"] += (
            _error_feedback_numel(plan, asked, stage, world_size) * dtype.itemsize
        )
        if asked.rank:
            sizes["staging"] += sum(factor_buffer_numels(plan.layout, asked.rank)) * dtype.itemsize
    overlap = config.zero_optimization.overlap_comm
    at_once = (grad_slots if _is_sharded(stage.main_grads) else MAX_IN_FLIGHT + 1) if overlap else 1
    if asked.codec is not None:
        coded = [
            plan
            for plan, dtype in zip(trained, dtypes, strict=True)
            if asked.feedback or not (world_size == 1 or asked.codec.is_identity(dtype))
        ]
        sizes["staging"] += _payload_bytes(coded, asked.codec, world_size, at_once)
    if _is_sharded(stage.model_weights):
        sizes += _weight_gather_bytes(plans, config, precision, world_size)
    return sizes


def _is_sharded(placement: Placement) -> bool:
    return placement is Placement.SHARDED


def _error_feedback_numel(
    plan: UnitPlan, asked: GradientCompression, stage: Stage, world_size: int
) -> int:
    """Elements of a unit's error feedback."""
    layout = plan.layout
    if not asked.feedback:
        return 0
    if asked.rank:
        return layout.numel + basis_numel(layout, asked.rank)
    sums_too = not _is_sharded(stage.optimizer_state) or world_size == 1
    return layout.numel + sums_too * layout.shard_numel


def _payload_bytes(plans: Sequence[UnitPlan], codec: Codec, world_size: int, at_once: int) -> int:
    """Payload buffers of reductions: each has two until it is waited for."""
    buffers = _simulated_buffers()
    in_flight: deque[list[Tensor]] = deque()
    for _ in range(_SIMULATED_PASSES):
        for plan in plans:
            while len(in_flight) >= at_once:
                _release_buffers(buffers, in_flight.popleft())
            nbytes = world_size * codec.payload_bytes(plan.layout.shard_numel)
            in_flight.append([buffers.acquire(nbytes), buffers.acquire(nbytes)])
        while in_flight:
            _release_buffers(buffers, in_flight.popleft())
    return buffers.total_bytes


def _weight_gather_bytes(
    plans: Sequence[UnitPlan], config: EngineConfig, precision: Precision, world_size: int
) -> Counter[str]:
    """Secondary partitions and payload buffers of sharded weights."""
    zero, sizes = config.zero_optimization, Counter[str]()
    size = hpz_group_size(zero.zero_hpz_partition_size, world_size, elastic=False)
    if size > 1:
        for plan in plans:
            item = precision.model_dtype(plan.params[0].dtype).itemsize
            sizes["second_shards"] += plan.layout.numel // size * item
    if zero.zero_quantized_weights:
        codec, buffers = weight_codec(config.rayzero.compression), _simulated_buffers()
        blocks: defaultdict[nn.Module | None, list[int]] = defaultdict(list)
        for plan in reversed(plans):
            blocks[plan.module].append(world_size * codec.payload_bytes(plan.layout.shard_numel))
        for _ in range(_SIMULATED_PASSES):
            for block in blocks.values():
                _release_buffers(buffers, [buffers.acquire(nbytes) for nbytes in block])
        sizes["staging"] += buffers.total_bytes
    return sizes


def _simulated_buffers() -> PayloadBuffers:
    return PayloadBuffers(cast(Collectives, _NullCollectives()), torch.device("meta"))


def _release_buffers(buffers: PayloadBuffers, acquired: Iterable[Tensor]) -> None:
    for buffer in acquired:
        buffers.release(buffer, CompletedWork())


class _NullCollectives:
    """The part of `Collectives` that `PayloadBuffers` uses, on the meta device."""

    def zeros(self, numel: int, dtype: torch.dtype, device: Any) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)
