"""The comparison's table: one row for each system, from the results of its ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

import torch

from benchmarks.gpu.ranks import Plan, RankResult
from examples.gpt.model import GPT
from rayzero.engine.accounting import FlopCount

BASE = "ddp"
LOSS_RTOL = 2e-2  # of the last losses' median; covers rounding to 16 bits
MULTI_RANK_NCCL = 2, 30  # first NCCL version that allows several ranks per GPU
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Row:
    """One system's line in the table: the maximum over its ranks.

    Attributes:
        mfu: model flops utilization, of counted operations; None on a CPU.
        static_bytes: allocated between two steps.
        loss: the median of the last steps', the mean over the ranks.
        error: why there is no result; empty on success.
    """

    system: str
    median_s: float | None = None
    min_s: float | None = None
    ratio: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    communication_s: float | None = None
    copies_s: float | None = None
    static_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    loss: float | None = None
    error: str = ""


def make_row(
    name: str, results: list[RankResult], plan: Plan, flops: int, peak: float | None
) -> Row:
    """Aggregate the ranks' results into a row without its ratio.

    Args:
        flops: of one step on one rank.
        peak: FLOP/s of the GPUs that all ranks share; None if unknown.
    """
    if errors := [result.error for result in results if result.error]:
        return Row(name, error=errors[0])
    seconds = [max(times) for times in zip(*(result.seconds for result in results), strict=True)]
    median_s = median(seconds)
    return Row(
        name,
        median_s=median_s,
        min_s=min(seconds),
        tokens_per_s=plan.ranks * plan.batch * plan.model.context / median_s,
        mfu=None if peak is None else plan.ranks * flops / median_s / peak,
        communication_s=_max_or_none([r.communication_s for r in results]),
        copies_s=_max_or_none([r.copies_s for r in results]),
        static_bytes=_max_or_none([r.static_bytes for r in results]),
        peak_bytes=_max_or_none([r.peak_bytes for r in results]),
        reserved_bytes=_max_or_none([r.reserved_bytes for r in results]),
        loss=sum(result.loss for result in results) / len(results),
    )


def _max_or_none(values: Iterable[Number | None]) -> Number | None:
    return max((value for value in values if value is not None), default=None)


def with_ratios(rows: list[Row]) -> list[Row]:
    """Add the ratio of each row's median to that of DDP, if both exist."""
    base = next((row.median_s for row in rows if row.system == BASE), None)
    return [
        row if base is None or row.median_s is None else replace(row, ratio=row.median_s / base)
        for row in rows
    ]


def find_diverging(rows: list[Row]) -> list[str]:
    """Systems whose last losses differ from DDP's, so that their times are not comparable."""
    base = next((row.loss for row in rows if row.system == BASE), None)
    if base is None:
        return []
    # not `>`: a NaN loss must count as diverging
    return [
        row.system
        for row in rows
        if row.loss is not None and not abs(row.loss - base) <= LOSS_RTOL * abs(base)
    ]


def count_flops(plan: Plan) -> int:
    """FLOPs of one rank's forward and backward pass."""
    with torch.device("meta"):
        model = GPT(plan.model)
        tokens = torch.zeros((plan.batch, plan.model.context), dtype=torch.int64)
    with FlopCount() as counter:
        model(tokens, tokens).backward()
    return counter.get_total_flops()


def unsupported_reason(ranks: int, gpus: int, nccl: tuple[int, ...]) -> str:
    """Why this many ranks cannot run on this many GPUs; empty if they can."""
    if ranks <= gpus or nccl >= MULTI_RANK_NCCL:
        return ""
    installed, required = (".".join(map(str, version)) for version in (nccl, MULTI_RANK_NCCL))
    return (
        f"{ranks} ranks on {gpus} GPU are not possible: NCCL {installed} allows one rank per GPU, "
        f"{required} and newer several (LD_PRELOAD its libnccl.so.2)"
    )
