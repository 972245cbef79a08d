"""The comparison on a GPU: timeline analysis, aggregation, and a run without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import compare
from benchmarks.gpu.compare import SMALL
from benchmarks.gpu.ranks import RankResult
from benchmarks.gpu.rows import (
    Row,
    count_flops,
    make_row,
    with_ratios,
)
from benchmarks.gpu.timeline import exposed_from_timeline
from tests.support.processes import start_forked


def test_only_non_overlapped_time_counts_as_exposed() -> None:
    kernels = [
        ("gemm", (0.0, 2.0)),
        ("elementwise", (1.5, 3.0)),
        ("ncclDevKernel_ReduceScatter", (2.0, 4.0)),  # one second exposed
        ("ncclDevKernel_AllGather", (3.5, 5.0)),  # overlaps the other stream: one more second
        ("Memcpy DtoH (Device -> Pinned)", (4.0, 6.5)),  # 1.5 s: collectives are not computation
        ("gemm", (5.5, 6.5)),
        ("Memcpy DtoD (Device -> Device)", (7.0, 8.0)),
        ("ncclDevKernel_AllGather", (7.5, 8.5)),  # half a second
    ]
    exposed = exposed_from_timeline(kernels, steps=2)
    assert exposed.communication_s == pytest.approx((2.0 + 0.5) / 2)
    assert exposed.copies_s == pytest.approx(1.5 / 2)
    assert exposed_from_timeline([], steps=1).communication_s == 0.0


def test_step_time_is_that_of_the_slowest_rank() -> None:
    plan = replace(SMALL, ranks=2)
    first = RankResult([1.0, 2.0, 3.0], loss=2.0, peak_bytes=5, communication_s=0.1)
    second = RankResult([4.0, 1.0, 1.0], loss=4.0, peak_bytes=7, communication_s=0.3)
    combined = make_row("rayzero-1", [first, second], plan, flops=30, peak=40.0)
    assert (combined.median_s, combined.min_s, combined.loss) == (3.0, 2.0, 3.0)
    assert (combined.peak_bytes, combined.communication_s, combined.copies_s) == (7, 0.3, None)
    assert combined.tokens_per_s == pytest.approx(2 * plan.batch * plan.model.context / 3.0)
    assert combined.mfu == pytest.approx(2 * 30 / 3.0 / 40.0)
    assert make_row("x", [first, RankResult([], error="exited")], plan, 0, None) == Row(
        "x", error="exited"
    )
    rows = with_ratios([replace(combined, system="ddp", median_s=2.0), combined, Row("x")])
    assert [row.ratio for row in rows] == [1.0, 1.5, None]


def test_flops_are_counted_on_meta_device() -> None:
    shape = SMALL.model
    matrices = 12 * shape.layers * shape.width**2 + shape.vocab * shape.width
    attention = 2 * shape.layers * shape.context * shape.width
    tokens = SMALL.batch * shape.context
    assert count_flops(SMALL) == pytest.approx(6 * tokens * (matrices + attention), rel=0.05)


@pytest.mark.slow
def test_benchmark_runs_and_reports_unsupported_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare.mp, "spawn", start_forked)
    path = tmp_path / "gpu.json"
    systems = "ddp,rayzero-3,fsdp2-all-cpu"
    options = ["--small", "--ranks", "2", "--systems", systems, "--json", str(path)]
    assert compare.main(options) == 0, capsys.readouterr().out
    document = json.loads(path.read_text())
    ddp, rayzero, unsupported = document["rows"]
    assert document["backend"] == "gloo"
    assert ddp["ratio"] == 1.0
    assert rayzero["median_s"] > 0
    assert abs(rayzero["loss"] - ddp["loss"]) < 0.02 * ddp["loss"]
    assert unsupported["error"] == "skipped: there is no GPU to offload from"
    assert unsupported["error"] in capsys.readouterr().out
