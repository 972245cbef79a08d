"""GRPO and PPO of the example as jobs: ranks, generators and a judge on a real Ray cluster.

The oracle of what they compute is the same example in one process, without a job.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from examples.rlhf import grpo, ppo, sft
from examples.rlhf.loop import LocalContext, read_job
from examples.rlhf.model import ModelConfig, Scorer, load_policy, load_scorer
from rayzero.engine.data.sample_ledger import read_ledger
from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job_events import Repaired, RoleFault, RoleWorkerReady
from rayzero.orchestrator.job_file import load_job
from rayzero.orchestrator.progress import StepRecord
from tests.house.source import ROOT
from tests.orchestrator.support import EventLog
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow
FOLDERS = {
    "actor_model_name_or_path": "actor-models",
    "critic_model_name_or_path": "reward-models",
}


def prepare(rank: int, world: int, folder: Path) -> float:
    """A policy that is sometimes right, and a scorer. Returns how often."""
    torch.set_num_threads(1)
    args = {"output_dir": folder / "actor-models"}
    result = sft.train(LocalContext(read_job("sft") | {"steps": 100, "args": args}))
    Scorer(ModelConfig()).save(folder / "reward-models")
    return result["exact_match"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    folder = tmp_path_factory.mktemp("models")
    (right,) = run_ranks(0, prepare, folder)
    return folder, right


def overrides(name: str, models: Path, out: Path, batch: int, lr: float) -> dict[str, Any]:
    """What is changed in the job file of that name, by dotted names."""
    job = read_job(name)
    changes: dict[str, Any] = {"args.output_dir": str(out)}
    for args in ("args", "roles.rollout.args", "roles.reward.args"):
        section = job
        for part in args.split("."):
            section = section.get(part, {})
        changes |= {
            f"{args}.{key}": str(models / FOLDERS[key]) for key in FOLDERS if key in section
        }
    for config in ("engine", "args.critic", "args.reference"):
        if config == "engine" or name == "ppo":
            changes[f"{config}.train_batch_size"] = batch
    changes["engine.scheduler.params.warmup_max_lr"] = lr
    return changes


def submit(name: str, changes: dict[str, Any], folder: Path) -> tuple[Any, EventLog]:
    common = {"checkpoint.path": str(folder / "runs"), "metrics.port": 0, "ledger": True}
    assignments = [f"{key}={value}" for key, value in (common | changes).items()]
    spec = load_job(ROOT / f"examples/rlhf/{name}.yaml", assignments)
    log = EventLog()
    return Job.from_spec(spec).submit(observer=log), log


def loop(rank: int, world: int, name: str, changes: dict[str, Any]) -> list[float]:
    """The rewards of the same job in one process."""
    torch.set_num_threads(1)
    job = read_job(name)
    for key, value in changes.items():
        *path, last = key.split(".")
        section = job
        for part in path:
            section = section[part]
        section[last] = value
    judge: Callable[..., Any] = grpo.check_group
    if name == "ppo":
        judge = partial(ppo.rate_group, load_scorer(job["args"]["critic_model_name_or_path"]))
    ctx = LocalContext(job, judge)
    {"job": grpo, "ppo": ppo}[name].train(ctx)
    return [it["reward"] for it in ctx.reported]


@pytest.mark.parametrize("name", ["job", "ppo"])
def test_rewards_without_lag_equal_the_loop_to_the_bit(
    no_leaks: None, models: tuple[Path, float], tmp_path: Path, name: str
) -> None:
    folder, _ = models
    changes = overrides(name, folder, tmp_path / "job", 32, 1e-3)
    changes |= {"steps": 8, "seed": 5, "workers.max": 1}
    changes |= {"rollouts.max_version_lag": 0, "roles.rollout.workers.max": 1}
    handle, log = submit(name, changes, tmp_path)
    handle.result()
    rewards = [record.gauges["reward"] for record in log.of(StepRecord)]
    changes["args.output_dir"] = str(tmp_path / "loop")
    assert [rewards] == run_ranks(0, loop, name, changes)
    assert len(set(rewards)) > 4
    policy, same = (load_policy(tmp_path / it).state_dict() for it in ("job", "loop"))
    for key, value in policy.items():
        assert torch.equal(value, same[key])


def test_grpo_learns_though_ranks_and_generators_die(
    no_leaks: None, models: tuple[Path, float], tmp_path: Path
) -> None:
    folder, before = models
    steps, batch = 50, 128
    changes = overrides("job", folder, tmp_path / "grpo", batch, 1e-3)
    changes |= {"steps": steps, "workers.min": 2, "faults": '["kill(rank=1, step=20)"]'}
    changes["recovery.mirror_every"] = 1  # else a busy machine may repeat a step
    handle, log = submit("job", changes, tmp_path)
    killed: list[int] = []
    for event in handle.events():
        if isinstance(event, StepRecord) and event.step == 8 and not killed:
            ready = [it for it in log.of(RoleWorkerReady) if it.role == "rollout"]
            killed.append(ready[0].worker.pid)
            os.kill(killed[0], signal.SIGKILL)
    result = handle.result()
    assert len(log.of(Repaired)) == 1
    assert [(it.role, it.cause) for it in log.of(RoleFault)] == [("rollout", "lost")]
    assert [it.step for it in log.of(StepRecord)] == [*range(1, steps + 1)]
    ledger = read_ledger(tmp_path / "runs" / "rlhf-grpo" / "ledger")
    numbers = [number for step in ledger.values() for number in step]
    assert sorted(numbers) == [*range(steps * batch)], "each sample of each prompt once"
    rewards = [record.gauges["reward"] for record in log.of(StepRecord)]
    assert fmean(rewards[-10:]) > fmean(rewards[:5]) + 0.15
    assert result.metrics["exact_match"] > before + 0.15
