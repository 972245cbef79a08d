"""The examples' jobs, shortened, with a worker killed in the middle. They run at the same time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.multimodal.train import TRAIN_PAIRS
from rayzero.engine.data.sample_ledger import check_ledger
from rayzero.engine.data.sampling import SampleOrder
from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job_events import Repaired
from rayzero.orchestrator.job_file import load_job
from rayzero.orchestrator.progress import StepRecord
from tests.house.source import ROOT
from tests.orchestrator.support import EventLog

pytestmark = pytest.mark.slow
TRAIN_IMAGES = 1437

KILLS = {
    "vision": ("steps=90", 'faults=["kill(rank=1, step=40)"]', "ledger=true"),
    "multimodal": (
        *("steps=130", "ledger=true"),
        """faults=['kill(rank=1, step=50, phase="backward")']""",  # in the gather's backward
    ),
    "rl": ("steps=640", 'faults=["kill(rank=1, step=209)"]'),  # 208 are 13 rollouts
}
"""Overrides of the examples' job files. The kills are in the forward if no phase is given."""


@dataclass(frozen=True)
class Run:
    """A job that has ended."""

    spec: Any
    folder: Path
    events: EventLog
    metrics: dict[str, Any]


@pytest.fixture(scope="module")
def runs(connected: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """All jobs by their example's name."""
    folder = tmp_path_factory.mktemp("runs")
    common = ("workers.cpus=0.5", f"checkpoint.path={folder}", "recovery.mirror_every=1")
    common += ("checkpoint.every_steps=50", "metrics.port=0")
    handles = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for name, overrides in KILLS.items():
            spec = load_job(ROOT / f"examples/{name}/job.yaml", [*common, *overrides])
            log = EventLog()
            handles[name] = (spec, log, Job.from_spec(spec).submit(observer=log))
    return {
        name: Run(spec, folder / spec.name, log, handle.result().metrics)
        for name, (spec, log, handle) in handles.items()
    }


@pytest.mark.parametrize("name", KILLS)
def test_killed_worker_costs_no_finished_step(name: str, runs: dict[str, Run]) -> None:
    run = runs[name]
    fired = (run.folder / "faults.jsonl").read_text().splitlines()
    assert [json.loads(line)["fault"] for line in fired] == [run.spec.faults[0]]
    (repair,) = run.events.of(Repaired)
    assert (repair.cause, repair.world_size_before) == ("lost", 2)
    assert repair.world_size in (1, 2)  # the replacement may come in time for it
    assert repair.steps_redone == 0
    steps = [record.step for record in run.events.of(StepRecord)]
    assert steps == list(range(1, run.spec.steps + 1))


@pytest.mark.parametrize(
    ("name", "samples"), [("vision", TRAIN_IMAGES), ("multimodal", TRAIN_PAIRS)]
)
def test_every_sample_is_used_once(name: str, samples: int, runs: dict[str, Run]) -> None:
    run = runs[name]
    order = SampleOrder(samples, run.spec.seed)
    assert check_ledger(run.folder / "ledger", order, run.spec.engine["train_batch_size"]) == []


def test_models_have_learned(runs: dict[str, Run]) -> None:
    assert runs["vision"].metrics["accuracy"] > 0.95
    pairs = runs["multimodal"].metrics
    assert min(pairs["image_to_caption"], pairs["caption_to_image"]) > 0.9
    assert runs["rl"].metrics["mean_return"] > 300  # 22 with random actions
