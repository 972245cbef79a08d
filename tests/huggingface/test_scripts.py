"""The scripts of tests/scripts run, with the real DeepSpeed's losses; the guide's commands too.

One start of torchrun runs them all: importing the libraries takes longer than the scripts do.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.engine.scripts import tiny
from tests.huggingface.runs import DDP_LOSSES, ROOT, recorded, run
from tests.scripts.together import HERE, RUNS
from tests.support.scripts import run_script

pytestmark = pytest.mark.timeout(1200)  # all scripts in one fixture, next to other tests
GUIDE = ROOT / "docs/huggingface.md"
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """{script: what rank 0 printed in each of its runs}."""
    folder = tmp_path_factory.mktemp("scripts")
    output = run([*TORCHRUN, "-m", "rayzero.deepspeed", str(HERE / "together.py"), str(folder)])
    runs: dict[str, list[dict[str, Any]]] = {}
    for line in output.splitlines():
        name, _, rest = line.partition(" ")
        if name in RUNS:
            runs.setdefault(name, []).append(json.JSONDecoder().raw_decode(rest)[0])
    return runs


@pytest.mark.slow
def test_all_scripts_run(printed: dict[str, list[dict[str, Any]]]) -> None:
    assert {name: len(runs) for name, runs in printed.items()} == {
        name: len(runs) for name, runs in RUNS.items()
    }
    assert all(one["processes"] == 2 for one in printed["accelerate_nlp"])
    for losses in (one["losses"] for one in printed["ds_cifar"]):
        assert losses[-1] < 0.9 * losses[0]
    assert len(printed["ds_zero3_generate"][0]["tokens"]) == 9
    assert printed["hf_run_clm"][1]["steps"] == 8  # resumed from the checkpoint of the first run


@pytest.mark.slow
def test_losses_equal_deepspeeds(printed: dict[str, list[dict[str, Any]]]) -> None:
    compared = 0
    for name, runs in printed.items():
        for index, ours in enumerate(runs):
            theirs = recorded(name, index)
            if theirs is not None:
                assert ours["losses"] == pytest.approx(theirs, rel=1e-5), (name, index)
                compared += 1
    assert compared == 26


@pytest.mark.slow
def test_online_dpo_equals_ddp(printed: dict[str, list[dict[str, Any]]]) -> None:
    """Losses and norms, as what is sampled; at stages 2 and 3."""
    for ours in printed["trl_online_dpo"]:
        assert ours["losses"] == pytest.approx(DDP_LOSSES["trl_online_dpo"], rel=1e-5)


@pytest.mark.slow
def test_loop_trainer_and_accelerate_equal_plain_torch(
    printed: dict[str, list[dict[str, Any]]],
) -> None:
    (checked,) = printed["check_equal"]
    errors = checked["errors"]
    assert len(errors) == 8
    for name, (losses, weights) in errors.items():
        assert weights < 1e-9, name
        assert losses < 2e-6, name  # transformers computes the loss in fp32, Trainer prints it so
    assert checked["processes"] == 2
    assert checked["own"] == [pytest.approx(tiny.train_reference(), rel=1e-9)] * 4


def guide_commands() -> list[str]:
    """The guide's command lines of scripts in this repository."""
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if "tests/scripts/" in line and not line.startswith("rayzero")]


@pytest.mark.slow
@pytest.mark.parametrize("line", guide_commands())
def test_the_guides_commands_run(line: str, tmp_path: Path) -> None:
    config = re.findall(r"```json\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)[0]
    (tmp_path / "ds_config.json").write_text(config)
    (tmp_path / "out").mkdir()
    words = [
        word.replace("ds_config.json", f"{tmp_path}/ds_config.json") for word in shlex.split(line)
    ]
    words = [f"{tmp_path}/out" if word == "out" else word for word in words]
    if words[:4] != TORCHRUN:
        assert '{"losses": [' in run(words)
        return
    done = run_script(*words[4:], ranks=2)  # `printed` starts torchrun
    assert done.returncode == 0, done.stderr[-4000:]
    assert '{"losses": [' in done.stdout
