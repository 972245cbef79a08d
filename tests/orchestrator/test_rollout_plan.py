"""The roles of a job that make rollouts, and what refuses them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.rollout_plan import plan_rollouts, rollout_stages
from rayzero.orchestrator.spec import JobSpec
from rayzero.workers.rollouts.ledger import RolloutPlan
from tests.orchestrator.support import plan

GENERATE = {"entrypoint": "m:generate", "takes": "prompts"}
SCORE = {"entrypoint": "m:score", "takes": "rollout", "recovery": {"hang_timeout_s": 7}}


def spec(**changes: Any) -> JobSpec:
    document = {
        "name": "job",
        "entrypoint": "m:train",
        "engine": {"train_batch_size": 16},
        "steps": 5,
        "rollouts": {"group": 4},
        "roles": {"reward": SCORE, "rollout": GENERATE, "server": {"entrypoint": "m:serve"}},
    }
    return JobSpec.model_validate(document | changes)


def test_plan_of_a_chain():
    assert rollout_stages(spec()) == {"rollout": 0, "reward": 1}
    expected = RolloutPlan(4, 4, 1, (120.0, 7.0), 2**30, prompts=20)
    assert plan_rollouts(spec()) == expected
    assert plan_rollouts(spec(rollouts=None, roles={"server": {"entrypoint": "m:serve"}})) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"roles": {}}, "no role takes prompts"),
        ({"roles": {"rollout": GENERATE | {"takes": "promts"}}}, "did you mean 'prompts'"),
        ({"roles": {"rollout": GENERATE | {"takes": "rollout"}}}, "role rollout takes 'rollout'"),
        ({"roles": {"a": GENERATE, "b": GENERATE}}, "roles a and b both take prompts"),
        (
            {"roles": {"a": GENERATE | {"takes": "b"}, "b": GENERATE | {"takes": "a"}}},
            "no role takes prompts, so that a, b would have no tasks",
        ),
        ({"rollouts": None}, "the job has no rollouts"),
        ({"rollouts": {"group": 3}}, "train_batch_size is 16 samples, with 3 samples"),
        ({"engine": None}, "no engine config"),
        ({"recovery": {"replicas": 0}}, "recovery.replicas is 0"),
        ({"recovery": {"mirror_every": 3}}, "would wait for each other"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], words: str):
    with pytest.raises(ConfigError) as error:
        plan_rollouts(spec(**changes))
    assert words in str(error.value)
    assert error.value.fix


@pytest.mark.parametrize(
    ("changes", "every"),
    [
        ({}, None),
        ({"roles": {"server": {"entrypoint": "m:serve"}}}, sys.maxsize),
        ({"roles": {"server": {"entrypoint": "m:serve"}}, "recovery": {"replicas": 0}}, None),
        (
            {
                "engine": {"train_batch_size": 8},
                "rollouts": {"max_version_lag": 2},
                "roles": {"rollout": GENERATE},
            },
            3,
        ),
    ],
)
def test_versions_are_mirrored_where_roles_may_read_them(
    tmp_path: Path, changes: dict[str, Any], every: int | None
):
    assert plan(tmp_path, **changes).worker_spec.mirror.version_every_steps == every
