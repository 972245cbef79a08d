from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import permutations

import pytest

from rayzero.engine.errors import ConfigError, RayzeroError
from rayzero.orchestrator.errors import JobConfigError, JobFailedError
from rayzero.orchestrator.policies.failure import Cause, Fail, Fault, Wait, decide

LOST = Fault(Cause.PROCESS_LOST, 1, "node-b", 4711, 8, "it was killed")
COLLECTIVE = Fault(Cause.COLLECTIVE, 0, "node-a", 4710, 8, "Connection closed", "frames")
USER = Fault(Cause.USER_CODE, 2, "node-c", 4712, 3, "ValueError: hole", "user frames")


def error(*faults: Fault, grace_over: bool = False) -> RayzeroError:
    decision = decide(faults, grace_over)
    assert isinstance(decision, Fail)
    return decision.error


def test_a_lost_worker_is_named_with_rank_node_pid_and_cause():
    failure = error(LOST)
    assert isinstance(failure, JobFailedError)
    text = "rank 1 on node node-b (pid 4711) was lost in step 8: it was killed"
    assert str(failure).startswith(text)


def test_a_failed_collective_waits_for_a_better_explanation():
    assert decide([COLLECTIVE], grace_over=False) == Wait()
    assert "was lost" in str(error(COLLECTIVE, LOST))


def test_a_failed_collective_that_nobody_explains_ends_the_job_after_the_grace():
    text = str(error(COLLECTIVE, grace_over=True))
    assert "a collective failed on rank 0" in text
    assert "recovery.hang_timeout_s" in text


@pytest.mark.parametrize("order", list(permutations((LOST, COLLECTIVE, USER))))
def test_the_order_of_arrival_does_not_matter(order: tuple[Fault, ...]):
    assert "was lost" in str(error(*order))


def test_user_code_is_named_with_its_step_and_its_frames():
    text = str(error(COLLECTIVE, USER))
    assert text.startswith(
        "the training function failed in step 3 on rank 2 on node node-c (pid 4712): ValueError"
    )
    assert text.endswith("user frames")
    assert "before the first step" in str(error(replace(USER, step=0)))


@pytest.mark.parametrize("cause", [Cause.CONFIG, Cause.ENTRYPOINT])
def test_the_users_own_mistake_stays_a_config_error_in_its_own_words(cause: Cause):
    failure = error(Fault(cause, 0, "n", 1, 0, "the batch sizes disagree"))
    assert isinstance(failure, ConfigError)
    assert str(failure) == "the batch sizes disagree"


def test_missing_data_is_told_in_its_own_words_without_frames():
    failure = error(Fault(Cause.DATA, 0, "n", 1, 0, "no such file"))
    assert isinstance(failure, JobFailedError)
    assert str(failure) == "no such file"


@pytest.mark.parametrize("kind", [JobFailedError, JobConfigError])
def test_the_errors_survive_pickling(kind: type[JobFailedError] | type[JobConfigError]):
    before = kind("seen", "allowed", "fix", "frames")
    after = pickle.loads(pickle.dumps(before))
    assert type(after) is kind
    assert (str(after), after.traceback) == (str(before), "frames")
