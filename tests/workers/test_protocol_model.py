"""The repair protocol, explored exhaustively: three ranks, two faults at every point of a step and
of a repair. `protocol_model` is what a rank does, `protocol_controller` the controller with the
product's own decisions, `protocol_exploration` says what is left out and why.

In every state that can be reached: no finished step is lost or made again, ranks that meet hold the
same state and are at the same place, a survivor's function is not called again once there is a
state to continue from, the samples of a step are those of the generation that made it. Every run
ends with all steps made and reported by all ranks, and needs for that no further fault, no new
worker, and no rank that sees that its peer is gone.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.workers.protocol_exploration import explore
from tests.workers.protocol_state import Mutation, ProtocolError, Setting

SETTINGS = {
    "stages 1 to 3": Setting(newcomers=2),
    "mirrors beside steps": Setting(beside=True, newcomers=0),
    "mirrors beside steps, one fault": Setting(beside=True, newcomers=2, faults=1),
    "stage 0": Setting(whole=True, newcomers=0),
    "stage 0, one fault": Setting(whole=True, newcomers=2, faults=1),
    "first steps": Setting(begins=True, newcomers=0),
}
KILL = re.compile(r"worker \d is killed in (\w+)")


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_every_run_ends_with_all_steps(setting: Setting):
    explored = explore(setting)
    assert {ranks for _, ranks in explored.ends} == {*range(3 - setting.faults, 4)}
    if (setting.newcomers, setting.faults) == (2, 2):
        killed = {match[1] for it in explored.steps if (match := KILL.match(it))}
        assert killed == {"parked", "idle", "start", "join", "compute", "vote", "mirror"}


def test_what_is_left_out_changes_no_end():
    setting = Setting(faults=1)
    reduced, full = explore(setting), explore(setting, reduces=False)
    assert reduced.ends == full.ends
    assert reduced.states < full.states


SHARDED = Setting(newcomers=0)
BESIDE = Setting(beside=True, newcomers=0)
WHOLE = Setting(whole=True, beside=True, newcomers=0)


@pytest.mark.parametrize(
    ("mutation", "setting", "message"),
    [
        (Mutation.REPORT_BEFORE_MIRROR, SHARDED, r"finished \(1, 1, 1\), restored \(1, 1\)"),
        (Mutation.COMMIT_WITHOUT_VOTE, BESIDE, r"finished \(1, 1\), restored \(\)"),
        (Mutation.COMMIT_WITHOUT_VOTE, WHOLE, "samples are used twice"),
        (Mutation.MEET_WITHIN_STEP, Setting(), "ranks meet in vote .* and compute"),
        (Mutation.ONE_SLOT, SHARDED, r"finished \(1, 1\), restored \(\)"),
        (Mutation.VOTE_BEFORE_MIRROR, BESIDE, r"finished \(1, 1\), restored \(\)"),
        (Mutation.EARLY_RELEASE, SHARDED, r"finished \(1, 1\), restored \(\)"),
        (Mutation.KEEP_ANY_STATE, SHARDED, "a rank keeps another state"),
        (Mutation.FENCE_UNWINDS, SHARDED, "the function of a survivor is called again"),
        (Mutation.SELECT_BEFORE_LEFT, SHARDED, "is called again|ranks meet"),
        (Mutation.FENCE_BEFORE_ASSIGN, SHARDED, "no worker can go on"),
        (Mutation.WAIT_FOR_LOST, SHARDED, "no worker can go on"),
    ],
)
def test_defect_of_the_protocol_is_found(mutation: Mutation, setting: Setting, message: str):
    with pytest.raises(ProtocolError, match=message):
        explore(replace(setting, mutation=mutation))
