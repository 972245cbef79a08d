"""Sums of codes: what arrives, that all ranks get the same bits, and what is kept back."""

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
    CollectiveSequencer,
    PayloadBuffers,
    QuantizedReduce,
)
from rayzero.engine.zero.reducer import ErrorFeedback
from tests.engine.comm.test_collectives import CPU, connect_gloo, with_and_without_sharing
from tests.support.ranks import run_ranks

CODECS: dict[str, Codec] = {
    "bf16": CastCodec("bf16", torch.bfloat16),
    "int8": Int8Codec(64),
    "sign": SignCodec(64),
}
PART = 160
GAPS = [slice(20, 32), slice(300, 320)]


def term(rank: int, world: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    values = torch.randn(world * PART, generator=generator)
    for gap in GAPS:
        values[gap] = 0
    return values


def coded(codec: Codec, values: Tensor) -> Tensor:
    codes, out = torch.empty(codec.payload_bytes(values.numel()), dtype=torch.uint8), values.clone()
    codec.encode(values, codes)
    codec.decode(codes, out, add=False)
    return out


def by_parts(codec: Codec, values: Tensor, world: int) -> Tensor:
    return torch.cat([coded(codec, part) for part in values.chunk(world)])


def cleared(codec: Codec, values: Tensor) -> Tensor:
    if not codec.keeps_zero:
        for gap in GAPS:
            values[gap] = 0
    return values


def right_sum(codec: Codec, world: int, seed: int) -> Tensor:
    return cleared(codec, sum(by_parts(codec, term(r, world, seed), world) for r in range(world)))


def make(ours: Collectives, name: str, feedback: ErrorFeedback | None = None) -> QuantizedReduce:
    coding = CodecContext(CODECS[name], ours, PayloadBuffers(ours, CPU), CollectiveSequencer())
    return QuantizedReduce(coding, GAPS, feedback)


def both_sums(rank: int, world: int, name: str, share: bool) -> list[Tensor]:
    ours, codec = connect_gloo(share), CODECS[name]
    sums = make(ours, name)
    full, out = term(rank, world, 0), torch.full((PART,), 7.0)
    expected = right_sum(codec, world, 0)
    sums.reduce_scatter(full, out).wait()
    torch.testing.assert_close(out, rank_chunk(expected, rank, world))
    sums.reduce_scatter(term(rank, world, 0), out, accumulate=True).wait()
    torch.testing.assert_close(out, 2 * rank_chunk(expected, rank, world))
    full = term(rank, world, 0)
    sums.reduce_scatter(full, rank_chunk(full, rank, world)).wait()
    torch.testing.assert_close(rank_chunk(full, rank, world), rank_chunk(expected, rank, world))

    full = term(rank, world, 0)
    sums.all_reduce(full).wait()
    torch.testing.assert_close(full, cleared(codec, by_parts(codec, expected, world)))
    moved = {key: one.bytes for key, one in ours.counters.by_name.items()}
    once = world * codec.payload_bytes(PART)
    assert moved == {"all_to_all": 4 * once, "all_gather": once}
    return [full]


@with_and_without_sharing
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CODECS)
def test_sums_of_codes(name: str, world: int, share: bool) -> None:
    results = run_ranks(world, both_sums, name, share)
    assert all(torch.equal(full[0], results[0][0]) for full in results)


def in_any_order(rank: int, world: int, name: str, share: bool) -> tuple[list[Tensor], int]:
    """Many sums at once, waited for in another order on every rank."""
    ours = connect_gloo(share)
    shuffled = random.Random(rank)
    results = []
    coding = CodecContext(CODECS[name], ours, PayloadBuffers(ours, CPU), CollectiveSequencer())
    sums = QuantizedReduce(coding, GAPS, None)
    for _ in range(3):
        jobs = []
        for seed in range(9):
            full = term(rank, world, seed)
            if seed % 3:
                jobs.append((sums.all_reduce(full), full))
            else:
                jobs.append((sums.reduce_scatter(full, rank_chunk(full, rank, world)), None))
            if shuffled.random() < 0.3:
                jobs[shuffled.randrange(len(jobs))][0].wait()
        order = list(range(len(jobs)))
        shuffled.shuffle(order)
        for number in order:
            jobs[number][0].wait()
            jobs[number][0].release()
        results += [full for _, full in jobs if full is not None]
        ours.all_reduce_scalars(torch.zeros(1))
    return results, coding.buffers.total_bytes


@with_and_without_sharing
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_may_wait_in_any_order(world: int, share: bool) -> None:
    results = run_ranks(world, in_any_order, "int8", share)
    for full, held in results:
        assert all(torch.equal(a, b) for a, b in zip(full, results[0][0], strict=True))
        assert held <= 2 * (MAX_IN_FLIGHT + 1) * world * CODECS["int8"].payload_bytes(PART)


def with_feedback(rank: int, world: int, name: str, whole: bool) -> tuple[Tensor, Tensor]:
    """(all that arrived, all that is kept back), in the unit's layout."""
    ours = connect_gloo(True)
    of_sum = torch.zeros(PART) if whole else None
    feedback = ErrorFeedback(torch.zeros(world * PART), of_sum)
    sums = make(ours, name, feedback)
    arrived = torch.zeros(world * PART)
    for seed in range(6):
        full = term(rank, world, seed)
        if whole:
            sums.all_reduce(full).wait()
            arrived += full
        else:
            sums.reduce_scatter(full, rank_chunk(arrived, rank, world), accumulate=True).wait()
    kept = feedback.local.clone()
    if of_sum is not None:
        rank_chunk(kept, rank, world).add_(of_sum)
    return arrived, kept


@pytest.mark.parametrize("whole", [True, False], ids=["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("name", ["int8", "sign"])
@pytest.mark.parametrize("world", [2, 3])
def test_what_arrived_and_what_is_kept_back_is_all_there_was(
    world: int, name: str, whole: bool
) -> None:
    results = run_ranks(world, with_feedback, name, whole)
    kept = sum(one for _, one in results)
    arrived = results[0][0] if whole else sum(one for one, _ in results)
    total = sum(term(rank, world, seed) for rank in range(world) for seed in range(6))
    torch.testing.assert_close(arrived + kept, total, atol=1e-4, rtol=1e-4)
    assert kept.abs().max() > 1e-3
    for gap in GAPS:
        assert not arrived[gap].any()
        assert not kept[gap].any()
