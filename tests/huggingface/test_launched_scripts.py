"""The scripts of tests/scripts through `rayzero launch`, each as it is, on one Ray cluster.

A sample of them in the suite, since each starts workers of its own: the first run of one script for
each library. All runs of all scripts with RAYZERO_ALL_SCRIPTS=1, which takes some minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tests.huggingface.test_scripts import NOT_COMPARED, RECORDED
from tests.scripts.together import FILES, HERE, RUNS

pytestmark = pytest.mark.slow
SAMPLE = ("ds_gan", "hf_run_clm", "trl_dpo", "peft_lora", "accelerate_nlp")
ALL = tuple(name for name in RUNS if name != "check_equal")  # that one is a test, not a script
RUNS_ALL = os.environ.get("RAYZERO_ALL_SCRIPTS") == "1"


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    context = ray.init(address="local", num_cpus=2, include_dashboard=False)
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.mark.parametrize("name", ALL if RUNS_ALL else SAMPLE)
def test_script_runs_as_it_is(name: str, cluster: str, tmp_path: Path) -> None:
    for file, document in FILES.items():
        (tmp_path / f"{file}.json").write_text(json.dumps(document))
    launch = [str(Path(sys.executable).parent / "rayzero"), "launch", "--workers", "2"]
    launch += ["--address", cluster, str(HERE / f"{name}.py")]
    for index, arguments in enumerate(RUNS[name] if RUNS_ALL else RUNS[name][:1]):
        words = [word.format(out=tmp_path, configs=tmp_path) for word in arguments]
        variables = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*launch, *words],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        _, found, rest = done.stdout.rpartition('{"losses": ')
        assert found, done.stdout[-4000:]
        losses, _ = json.JSONDecoder().raw_decode(rest)
        if name in RECORDED and (name, index) not in NOT_COMPARED:
            assert losses == pytest.approx(RECORDED[name][index], rel=1e-5), index
