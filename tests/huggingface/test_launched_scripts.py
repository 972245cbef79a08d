"""The scripts of tests/scripts through `rayzero launch`, each as it is, on one Ray cluster.

A sample of them in the suite, since each starts workers of its own: the first run of one script for
each library. All runs of all scripts with RAYZERO_ALL_SCRIPTS=1, which takes some minutes.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import ray

from tests.house.source import commands
from tests.huggingface.runs import DDP_LOSSES, recorded
from tests.integration.command_server import CommandServer
from tests.scripts.together import FILES, HERE, RUNS
from tests.support.forking import fork_server

pytestmark = pytest.mark.slow
SAMPLE = ("ds_gan", "hf_run_glue", "trl_dpo", "trl_online_dpo", "peft_lora", "accelerate_nlp")
ALL = tuple(name for name in RUNS if name != "check_equal")  # that one is a test, not a script
RUNS_ALL = os.environ.get("RAYZERO_ALL_SCRIPTS") == "1"


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with fork_server():
        context = ray.init(address="local", num_cpus=4, include_dashboard=False)
        yield context.address_info["gcs_address"]
        ray.shutdown()


def variables(cluster: str) -> dict[str, str]:
    return {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", "RAY_ADDRESS": cluster}


def run(command: list[str], cluster: str, folder: Path) -> str:
    """What it has printed."""
    env = os.environ | variables(cluster)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, (command, (done.stdout + done.stderr)[-4000:])
    return done.stdout


@pytest.mark.parametrize("name", ALL if RUNS_ALL else SAMPLE)
def test_script_runs_as_it_is(name: str, cluster: str, tmp_path: Path) -> None:
    for file, document in FILES.items():
        (tmp_path / f"{file}.json").write_text(json.dumps(document))
    rayzero = str(Path(sys.executable).parent / "rayzero")
    launch = [rayzero, "launch", "--workers", "2", str(HERE / f"{name}.py")]
    for index, arguments in enumerate(RUNS[name] if RUNS_ALL else RUNS[name][:1]):
        words = [word.format(out=tmp_path, configs=tmp_path) for word in arguments]
        printed = run([*launch, *words], cluster, tmp_path)
        _, found, rest = printed.rpartition('{"losses": ')
        assert found, printed[-4000:]
        losses, _ = json.JSONDecoder().raw_decode(rest)
        theirs = DDP_LOSSES.get(name) or recorded(name, index)
        if theirs is not None:
            assert losses == pytest.approx(theirs, rel=1e-5), index


GUIDES = ("README.md", "docs/huggingface.md", "docs/jobs.md")
GUIDES_SCRIPT = """\
import argparse, os
import deepspeed, torch
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--deepspeed")
options, _ = parser.parse_known_args()
own = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}}
is_given = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") != "0"
model = torch.nn.Linear(4, 1)
engine, _, loader, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1) if is_given else None,
    training_data=TensorDataset(torch.ones(8, 4)),
    config=None if is_given else options.deepspeed or own,
)
for _ in range(options.epochs):
    for (rows,) in loader:
        engine.backward(engine(rows).mean())
        engine.step()
if engine.global_rank == 0:
    print("stage", engine.zero_optimization_stage(), "epochs", options.epochs, flush=True)
"""


@pytest.mark.timeout(1200)
def test_launch_commands_of_the_guides_run_as_written(cluster: str, tmp_path: Path) -> None:
    """But for those of tuning, which are in tests/integration/test_command.py."""
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/train.py"):
        (tmp_path / name).write_text(GUIDES_SCRIPT)
    for stage, name in ((1, "ds.json"), (2, "ds_config.json")):
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
        config["optimizer"] = {"type": "SGD"}
        (tmp_path / name).write_text(json.dumps(config))
    pages = [(HERE.parents[1] / page).read_text(encoding="utf-8") for page in GUIDES]
    lines = [line for page in pages for line in commands(page)]
    launched = [line for line in lines if line.startswith("rayzero launch ")]
    launched = [line for line in launched if "--autotuning" not in line]
    assert len(launched) >= 5
    with closing(CommandServer(os.environ | variables(cluster), tmp_path)) as server:
        done = {line: server.run(*shlex.split(line, comments=True)[1:]) for line in launched}
    for line, ran in done.items():
        assert ran.returncode == 0, (line, (ran.stdout + ran.stderr)[-4000:])
        stage = 3 if "--stage 3" in line else 2 if "ds_config" in line else "ds.json" in line
        epochs = 3 if "--epochs 3" in line else 1
        assert f"stage {int(stage)} epochs {epochs}\n" in ran.stdout, (line, ran.stdout)
