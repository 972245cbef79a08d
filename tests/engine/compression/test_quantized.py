"""Quantized reductions: results, equality of ranks, error feedback."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from rayzero.engine.comm.backend import rank_chunk
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.compression.codecs import CastCodec, Codec, Int8Codec, SignCodec
from rayzero.engine.compression.quantized import (
    MAX_IN_FLIGHT,
    CodecContext,
    QuantizedReduce,
)
from rayzero.engine.layout.flat_layout import ParamSpec, make_layout
from rayzero.engine.zero.grad_reduction import ErrorFeedback, UnitGradSpec
from tests.engine.comm.gloo_ranks import connect_gloo, with_and_without_sharing
from tests.support.ranks import run_ranks

CODECS: dict[str, Codec] = {
    "bf16": CastCodec("bf16", torch.bfloat16),
    "int8": Int8Codec(64),
    "sign": SignCodec(64),
}
PART = 160
PADDING = [slice(20, 32), slice(300, 320)]


def term(rank: int, world: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    values = torch.randn(world * PART, generator=generator)
    for gap in PADDING:
        values[gap] = 0
    return values


def decoded(codec: Codec, values: Tensor) -> Tensor:
    payload = torch.empty(codec.payload_bytes(values.numel()), dtype=torch.uint8)
    out = values.clone()
    codec.encode(values, payload)
    codec.decode(payload, out, add=False)
    return out


def decoded_parts(codec: Codec, values: Tensor, world: int) -> Tensor:
    return torch.cat([decoded(codec, part) for part in values.chunk(world)])


def zero_padding(codec: Codec, values: Tensor) -> Tensor:
    if not codec.keeps_zero:
        for gap in PADDING:
            values[gap] = 0
    return values


def expected_sum(codec: Codec, world: int, seed: int) -> Tensor:
    return zero_padding(
        codec, sum(decoded_parts(codec, term(r, world, seed), world) for r in range(world))
    )


def make_reduce(
    collectives: Collectives, name: str, feedback: ErrorFeedback | None = None
) -> QuantizedReduce:
    return QuantizedReduce(CodecContext(CODECS[name], collectives), PADDING, feedback)


def reduce_both_ways(rank: int, world: int, name: str, share: bool) -> list[Tensor]:
    collectives, codec = connect_gloo(share), CODECS[name]
    reduce = make_reduce(collectives, name)
    full, out = term(rank, world, 0), torch.full((PART,), 7.0)
    expected = expected_sum(codec, world, 0)
    reduce.reduce_scatter(full, out).wait()
    torch.testing.assert_close(out, rank_chunk(expected, rank, world))
    reduce.reduce_scatter(term(rank, world, 0), out, accumulate=True).wait()
    torch.testing.assert_close(out, 2 * rank_chunk(expected, rank, world))
    full = term(rank, world, 0)
    reduce.reduce_scatter(full, rank_chunk(full, rank, world)).wait()
    torch.testing.assert_close(rank_chunk(full, rank, world), rank_chunk(expected, rank, world))

    full = term(rank, world, 0)
    reduce.all_reduce(full).wait()
    torch.testing.assert_close(full, zero_padding(codec, decoded_parts(codec, expected, world)))
    moved = {key: counter.bytes for key, counter in collectives.counters.by_name.items()}
    once = world * codec.payload_bytes(PART)
    assert moved == {"all_to_all": 4 * once, "all_gather": once}
    return [full]


@with_and_without_sharing
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CODECS)
def test_sums_of_quantized_values(name: str, world: int, share: bool) -> None:
    results = run_ranks(world, reduce_both_ways, name, share)
    assert all(torch.equal(full[0], results[0][0]) for full in results)


def wait_in_any_order(rank: int, world: int, name: str, share: bool) -> tuple[list[Tensor], int]:
    """Start many reductions and wait for them in a different order on every rank."""
    collectives = connect_gloo(share)
    shuffled = random.Random(rank)
    results = []
    context = CodecContext(CODECS[name], collectives)
    reduce = QuantizedReduce(context, PADDING, None)
    for _ in range(3):
        pending = []
        for seed in range(9):
            full = term(rank, world, seed)
            if seed % 3:
                pending.append((reduce.all_reduce(full), full))
            else:
                pending.append((reduce.reduce_scatter(full, rank_chunk(full, rank, world)), None))
            if shuffled.random() < 0.3:
                pending[shuffled.randrange(len(pending))][0].wait()
        order = list(range(len(pending)))
        shuffled.shuffle(order)
        for number in order:
            pending[number][0].wait()
            pending[number][0].release()
        results += [full for _, full in pending if full is not None]
        collectives.sum_scalars(torch.zeros(1))
    return results, context.buffers.total_bytes


@with_and_without_sharing
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_may_wait_in_any_order(world: int, share: bool) -> None:
    results = run_ranks(world, wait_in_any_order, "int8", share)
    for full, buffer_bytes in results:
        assert all(torch.equal(a, b) for a, b in zip(full, results[0][0], strict=True))
        assert buffer_bytes <= 2 * (MAX_IN_FLIGHT + 1) * world * CODECS["int8"].payload_bytes(PART)


def reduce_with_feedback(rank: int, world: int, name: str, whole: bool) -> tuple[Tensor, Tensor]:
    """(sum of the results, residuals), in the unit's layout."""
    collectives = connect_gloo(True)
    layout = make_layout("unit", [ParamSpec("weight", (world * PART,))], world)
    unit = UnitGradSpec(layout, torch.float32, layout.shard(rank), whole)
    reduced = torch.zeros(PART) if whole else None
    feedback = ErrorFeedback(unit, torch.zeros(world * PART), reduced)
    reduce = make_reduce(collectives, name, feedback)
    arrived = torch.zeros(world * PART)
    for seed in range(6):
        full = term(rank, world, seed)
        if whole:
            reduce.all_reduce(full).wait()
            arrived += full
        else:
            reduce.reduce_scatter(full, rank_chunk(arrived, rank, world), accumulate=True).wait()
    residuals = feedback.local.clone()
    if reduced is not None:
        rank_chunk(residuals, rank, world).add_(reduced)
    return arrived, residuals


@pytest.mark.parametrize("whole", [True, False], ids=["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("name", ["int8", "sign"])
@pytest.mark.parametrize("world", [2, 3])
def test_results_and_residuals_add_up_to_the_gradients(world: int, name: str, whole: bool) -> None:
    results = run_ranks(world, reduce_with_feedback, name, whole)
    residuals = sum(residual for _, residual in results)
    arrived = results[0][0] if whole else sum(result for result, _ in results)
    total = sum(term(rank, world, seed) for rank in range(world) for seed in range(6))
    torch.testing.assert_close(arrived + residuals, total, atol=1e-4, rtol=1e-4)
    assert residuals.abs().max() > 1e-3
    for gap in PADDING:
        assert not arrived[gap].any()
        assert not residuals[gap].any()
