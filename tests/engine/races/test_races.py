"""The engine on virtual streams: a sample of `python -m benchmarks.races`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.engine import zoo
from tests.engine.offload.training import CLIP, SAMPLES, config, make_engine
from tests.support.races.cases import Case, sample_cases
from tests.support.races.mutants import leave_out
from tests.support.races.running import run_case, run_ranks
from tests.support.races.survivors import JUSTIFIED
from tests.support.races.waits import all_waits
from tests.support.ranks import run_ranks as run_processes

_FILE = Case(stage=1, offload="nvme", precision="fp32")
_HOST_OPTIMIZER = Case(stage=1, offload="optimizer")
VOTE = "event.synchronize at engine/device.py"
WAITS_FOR_THE_VOTE_ONLY = ("plain", "own backward", "empty batch")  # scripts

TRIPLES = [  # beside every pair of settings
    *(Case(stage=stage, script="own backward", micro_steps=3) for stage in range(4)),
    *(Case(optimizer=name, micro_steps=1) for name in ("SGD", "Lion", "Adagrad")),
    # Copies of offloaded weights, a block that was prefetched and not used: each raced with a load
    # or a write through the engine between two steps.
    Case(stage=1, precision="fp32", offload="optimizer", script="load"),
    Case(stage=1, precision="fp32", offload="optimizer", script="access"),
    Case(stage=3, precision="fp32", model="branching", script="load"),
    Case(stage=3, offload="both", script="mirror"),
]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_no_race_and_the_host_waits_once_a_step():
    """For the vote, and for offloaded state; no copy blocks it."""
    for case in [*sample_cases(), *TRIPLES]:
        findings = run_case(case)
        assert findings.clean, str(findings)
        syncs = findings.syncs_per_step
        if case.script in WAITS_FOR_THE_VOTE_ONLY:
            assert not [what for what in syncs if "blocking" in what or "item" in what], case
            if case.offload == "none":
                assert list(syncs.values()) == [1.0], (case, syncs)
                assert next(iter(syncs)).startswith(VOTE), (case, syncs)


@pytest.mark.parametrize(
    "case",
    [
        Case(stage=0, micro_steps=1),
        Case(stage=3, offload="both", model="decoder"),
        Case(stage=3, gradients="int8", weights="int8"),
        Case(stage=3, script="own backward", precision="fp16"),
    ],
    ids=str,
)
def test_two_ranks_launch_the_same_collectives(case: Case):
    """Their values differ, so what depends on them would show."""
    first, second = run_ranks(case)
    assert first.clean, str(first)
    assert second.clean, str(second)
    assert first.launches == second.launches
    assert len(first.launches) > 10


@pytest.mark.parametrize(
    ("file", "text", "case"),
    [
        ("engine/comm/backend.py", "work.wait()", Case(micro_steps=1)),
        ("engine/zero/gradients.py", "self._transfer.wait_d2h()", Case(stage=3, offload="both")),
        ("engine/zero/runtime.py", "work.wait()", Case(stage=1)),
        ("engine/offload/stores.py", "self._transfer.sync_compute()", _HOST_OPTIMIZER),
        ("engine/offload/nvme_store.py", "buffer.wait()", Case(stage=1, offload="nvme")),
        ("workers/state_copy.py", "self._stream.wait_stream(compute)", Case(script="mirror")),
        ("engine/offload/nvme_store.py", "event.synchronize()", _FILE),
    ],
)
def test_a_wait_that_is_left_out_is_noticed(file: str, text: str, case: Case):
    """A sample; all waits are tried in the benchmark."""
    wait = next(it for it in all_waits() if (it.file, it.text) == (file, text))
    with leave_out(wait):
        findings = run_case(case)
    assert findings.races, f"{wait.key} can be left out"


def test_justified_waits_exist():
    stale = set(JUSTIFIED) - {wait.key for wait in all_waits()}
    assert not stale, f"remove from survivors.py: {stale}"


def train_with_hooks_elsewhere(rank: int, world: int, stage: int) -> dict[str, Tensor]:
    backward = Tensor.backward

    def in_a_thread(loss: Tensor, **options: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(backward, loss, **options).result()

    engine = make_engine(config(stage), zoo.sgd, dtype=torch.float64)
    with mock.patch.object(Tensor, "backward", in_a_thread):
        zoo.train(engine, zoo.batches(3, SAMPLES))
    return engine.state_dict()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_hooks_run_in_another_thread(stage: int):
    """As on a GPU, whose nodes of the graph autograd runs in a thread of its own."""
    state = run_processes(2, train_with_hooks_elsewhere, stage)[0]
    data = list(zoo.batches(3, SAMPLES))
    _, expected = zoo.train_reference(zoo.make_model(torch.float64), zoo.sgd, data, CLIP)
    assert max(zoo.relative_error(state[name], expected[name]) for name in expected) < 1e-9
