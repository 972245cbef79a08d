"""The engine under torch's own checks of devices, on a `cuda:0` without memory."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tests.support.fake_cuda.build import compiler, run_module
from tests.support.races.cases import Case

CASES = [
    *(Case(stage=stage) for stage in range(4)),
    Case(stage=2, offload="half", precision="fp16"),
    Case(stage=3, offload="both", model="irregular"),
    Case(stage=3, weights="int8 and hpz", gradients="int8", world_size=4),
    Case(stage=1, gradients="lowrank", offload="optimizer"),
    Case(stage=2, optimizer="Muon", model="decoder"),
    Case(stage=0, optimizer="Lamb", precision="fp32"),
]

LARGE = {"layers": 3, "stage": 3, "world_size": 8}


@pytest.fixture(scope="module")
def answers():
    if compiler() is None:
        pytest.skip("no C++ compiler (CXX, or g++)")
    return run_module("tests.support.fake_cuda", [*map(asdict, CASES), {"large": LARGE}])


@pytest.fixture(scope="module")
def found(answers):
    return answers[:-1]


@pytest.fixture(scope="module")
def large(answers):
    return answers[-1]


def test_torch_and_nccl_refuse_nothing(found):
    for result in found:
        assert result["error"] is None, f"{result['case']}: {result['error']}"
        assert not result["refused"], f"{result['case']}: {result['refused']}"


def test_hooks_run_in_autograds_thread_of_the_device(found):
    """As on a GPU: the engine must not depend on the thread of its hooks."""
    assert all(len(result["hook_threads"]) == 2 for result in found)


def test_the_host_reads_once_a_step_and_no_copy_blocks(found):
    for result in found:
        if result["case"]["offload"] == "none":
            assert list(result["syncs_per_step"].values()) == [1.0], result
    for result in found:
        blocking = [what for what in result["syncs_per_step"] if not what.startswith("synchronize")]
        assert not blocking, f"{result['case']}: {blocking}"


def test_slots_of_a_large_model_have_the_planned_bytes(large):
    """Blocks and embedding of Llama-3-8B; more blocks of the same size need no more slots."""
    assert not large["refused"]
    assert large["grad_slots"] == large["plan"]["grad_slots"] <= 1.5e9
    assert large["gather_buffers"] == large["plan"]["slots"]
    # The plan leaves out scalars, such as the vote's.
    assert large["peak"] == pytest.approx(large["plan_peak"], rel=1e-3)
