"""The benchmark of one GPU runs, also without one, and reads a timeline rightly."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import SMALL, Row, disagreeing, flops_of, impossible, row, with_ratios
from benchmarks.gpu_rank import Found
from benchmarks.kernels import of_timeline

ROOT = Path(__file__).resolve().parents[2]


def test_what_overlaps_with_computation_is_not_exposed() -> None:
    kernels = [
        ("gemm", (0.0, 2.0)),
        ("elementwise", (1.5, 3.0)),
        ("ncclDevKernel_ReduceScatter", (2.0, 4.0)),  # one second of it
        ("ncclDevKernel_AllGather", (3.5, 5.0)),  # in two streams: one more, not one and a half
        ("Memcpy DtoH (Device -> Pinned)", (4.0, 6.5)),  # 1.5: a collective is no computation
        ("gemm", (5.5, 6.5)),
        ("Memcpy DtoD (Device -> Device)", (7.0, 8.0)),
        ("ncclDevKernel_AllGather", (7.5, 8.5)),  # half of it
    ]
    found = of_timeline(kernels, steps=2)
    assert found.communication_s == pytest.approx((2.0 + 0.5) / 2)
    assert found.copies_s == pytest.approx(1.5 / 2)
    assert of_timeline([], steps=1).communication_s == 0.0


def test_a_step_is_as_long_as_its_slowest_rank() -> None:
    plan = replace(SMALL, ranks=2)
    one = Found([1.0, 2.0, 3.0], loss=2.0, peak_bytes=5, communication_s=0.1)
    other = Found([4.0, 1.0, 1.0], loss=4.0, peak_bytes=7, communication_s=0.3)
    found = row("rayzero-1", [one, other], plan, flops=30, peak=40.0)
    assert (found.median_s, found.min_s, found.loss) == (3.0, 2.0, 3.0)
    assert (found.peak_bytes, found.communication_s, found.copies_s) == (7, 0.3, None)
    assert found.tokens_per_s == pytest.approx(2 * plan.batch * plan.model.context / 3.0)
    assert found.mfu == pytest.approx(2 * 30 / 3.0 / 40.0)
    assert row("x", [one, Found([], error="gone")], plan, 0, None) == Row("x", error="gone")
    ratio = with_ratios([replace(found, system="ddp", median_s=2.0), found, Row("x")])
    assert [one.ratio for one in ratio] == [1.0, 1.5, None]


@pytest.mark.parametrize(("loss", "agrees"), [(5.09, True), (5.2, False), (math.nan, False)])
def test_other_work_is_named(loss: float, agrees: bool) -> None:
    rows = [Row("ddp", loss=5.0), Row("rayzero-3", loss=loss), Row("fsdp2", error="skipped")]
    assert disagreeing(rows) == ([] if agrees else ["rayzero-3"])


def test_several_ranks_on_one_gpu_need_a_new_nccl() -> None:
    assert impossible(1, 1, (2, 10, 0)) == impossible(2, 1, (2, 30, 4)) == ""
    assert "NCCL 2.28.9 allows one rank a GPU, 2.30" in impossible(2, 1, (2, 28, 9))


def test_flops_are_counted_without_memory() -> None:
    shape = SMALL.model
    matrices = 12 * shape.layers * shape.width**2 + shape.vocab * shape.width
    attention = 2 * shape.layers * shape.context * shape.width
    tokens = SMALL.batch * shape.context
    assert flops_of(SMALL) == pytest.approx(6 * tokens * (matrices + attention), rel=0.05)


@pytest.mark.slow
def test_it_runs_and_says_what_it_cannot_run(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    systems = "ddp,rayzero-3,fsdp2-all-cpu"
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--ranks", "2"]
    done = subprocess.run(
        [*command, "--systems", systems, "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    ddp, ours, refused = document["rows"]
    assert document["backend"] == "gloo"
    assert ddp["ratio"] == 1.0
    assert ours["median_s"] > 0
    assert abs(ours["loss"] - ddp["loss"]) < 0.02 * ddp["loss"]
    assert refused["error"] == "skipped: there is no GPU to offload from"
    assert refused["error"] in done.stdout
