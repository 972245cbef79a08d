"""The engine on virtual streams: a sample of `python -m benchmarks.races`."""

from __future__ import annotations

import pytest
import torch

from tests.support.races.cases import Case, sample_cases
from tests.support.races.mutants import leave_out
from tests.support.races.running import run_case, run_ranks
from tests.support.races.survivors import JUSTIFIED
from tests.support.races.waits import all_waits

_FILE = Case(stage=1, offload="nvme", precision="fp32")
_HOST_OPTIMIZER = Case(stage=1, offload="optimizer")
VOTE = "event.synchronize at engine/device.py"


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_no_pair_of_settings_races():
    for case in sample_cases():
        findings = run_case(case)
        assert findings.clean, str(findings)


@pytest.mark.parametrize(
    "case",
    [
        *(Case(stage=stage, micro_steps=3) for stage in range(4)),
        *(Case(stage=stage, script="own backward") for stage in range(4)),
        *(Case(optimizer=name, micro_steps=1) for name in ("SGD", "Lion", "Lamb", "Adagrad")),
        *(Case(stage=0, optimizer=name, micro_steps=1) for name in ("Lamb", "OneBitAdam")),
        Case(optimizer="Muon", gradients="lowrank", precision="fp16"),
    ],
    ids=str,
)
def test_the_host_waits_once_a_step(case: Case):
    """For the vote; and no copy blocks it."""
    syncs = run_case(case).syncs_per_step
    assert list(syncs.values()) == [1.0], syncs
    assert next(iter(syncs)).startswith(VOTE), syncs


@pytest.mark.parametrize("offload", ["optimizer", "both", "nvme and weights"])
def test_offload_does_not_block_the_host_in_copies(offload: str):
    syncs = run_case(Case(stage=3, offload=offload)).syncs_per_step
    assert not [what for what in syncs if "blocking" in what or "item" in what], syncs


@pytest.mark.parametrize(
    "case",
    [
        Case(precision="fp32", lazy_weights=True, script="load"),
        Case(stage=1, precision="fp32", offload="optimizer", script="load"),
        Case(stage=1, precision="fp32", offload="optimizer", script="access"),
        Case(stage=3, precision="fp32", model="branching", script="load"),
    ],
    ids=str,
)
def test_what_is_in_flight_ends_before_a_script_writes_the_state(case: Case):
    """Gathers of updated weights, copies of offloaded ones, a block that was prefetched and not
    used: each raced with a load or a write through the engine between two steps."""
    findings = run_case(case)
    assert findings.clean, str(findings)


@pytest.mark.parametrize(
    "case", [Case(script="mirror"), Case(stage=3, offload="both", script="mirror")], ids=str
)
def test_a_mirror_beside_training_neither_races_nor_is_believed_early(case: Case):
    findings = run_case(case)
    assert findings.clean, str(findings)


@pytest.mark.parametrize(
    "case",
    [
        Case(stage=0, micro_steps=1),
        Case(stage=2, offload="optimizer"),
        Case(stage=3, offload="both", model="decoder"),
        Case(stage=3, gradients="int8", weights="int8"),
        Case(stage=0, script="own backward"),
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
        ("engine/zero/lazy_weights.py", "work.wait()", Case(stage=1, lazy_weights=True)),
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
