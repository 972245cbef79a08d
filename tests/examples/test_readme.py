"""Code blocks of README.md and docs run as written: the first script, its kill, and those that
need no cluster. `tests/house/test_blocks.py` says which test runs which block.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rayzero.orchestrator.cli.app import app
from tests.house.blocks import blocks
from tests.support.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LOSS = 0.0959
NUMBER = re.compile(r"[\d.]+")


def block(page: str, language: str, containing: str) -> str:
    (found,) = [
        item.text for item in blocks(page) if item.language == language and containing in item.text
    ]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With README's files."""
    for item in blocks("README.md"):
        if item.file:
            (tmp_path / item.file).write_text(item.text, encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_first_script_reproduces_documented_losses(folder: Path) -> None:
    documented = re.search(r"the same five losses, ([\d.]+) to ([\d.]+):", README)
    assert documented is not None
    for ranks in (0, 2):
        done = run_script("first.py", ranks=ranks, cwd=folder)
        assert done.returncode == 0, done.stderr
        losses = re.findall(r"epoch \d: loss ([\d.]+)", done.stdout)
        assert len(losses) == 5
        assert [float(losses[0]), float(losses[-1])] == pytest.approx(
            [float(loss) for loss in documented.groups()], rel=0.05
        )


@pytest.mark.slow
def test_kill_of_the_first_job_is_repaired_as_shown(folder: Path) -> None:
    """Its command as written; every line shown is in the output, but for its numbers."""
    program, *words = shlex.split(block("README.md", "bash", "'faults=["))
    assert program == "rayzero"
    shown = block("README.md", "text", "2 -> 1 workers after step 39")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    env.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-m", program, *words],
        cwd=folder,
        env=env,
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [_without_numbers(line) for line in done.stdout.splitlines()]
    faults_page = block("docs/faults.md", "text", "repaired in")
    for line in (*shown.splitlines(), *faults_page.splitlines()):
        beginning = _without_numbers(line.partition(" ...")[0])
        assert any(text.startswith(beginning) for text in printed), (line, done.stdout)
    # Later where the second worker was late. A step may have had no copy: they are short.
    assert re.search(
        r"2 -> 1 workers after step (3\d|[4-9]\d|1\d\d), (no|\d) steps? recomputed", done.stdout
    )
    assert "raylet" not in done.stderr
    (last,) = re.findall(r"epoch 4: loss ([\d.]+)", done.stdout)
    assert float(last) == pytest.approx(LOSS, rel=0.05)


def _without_numbers(line: str) -> str:
    """And without the name of the machine, the cause of a loss, which Ray may tell first, and the
    replacement, which joins if it comes before the end."""
    line = re.sub(r"(was lost after step \d+:).*", r"\1", re.sub(r"on node \S+", "on node", line))
    line = re.sub(r"\d( then \d)+ workers", "1 workers", line)
    return NUMBER.sub("#", re.sub(r"\bno step\b|\b(\d+) steps\b", "1 step", line))


def run_block(code: str, cwd: Path) -> str:
    done = run_script("-c", code, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_lines(page: str, beginning: str, cwd: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each of the page's command lines that begin so prints."""
    monkeypatch.chdir(cwd)
    outputs = []
    lines = [line for item in blocks(page) if item.language == "bash" for line in item.lines()]
    for line in (line for line in lines if line.startswith(beginning)):
        words, _, file = line.partition(" > ")
        done = CliRunner().invoke(app, shlex.split(words, comments=True)[1:])
        assert done.exit_code == 0, (line, done.output)
        outputs.append(done.output)
        if file:
            Path(file.split()[0]).write_text(done.output, encoding="utf-8")
    return outputs


ENGINE = """
import torch, rayzero
model = torch.nn.Linear(3, 2)
config = {"train_batch_size": 2, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 1}}
engine, *_ = rayzero.initialize(model=model, config=config)
"""
TRAIN = """
for _ in range(2):
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
"""


def test_checkpoint_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of the format reads a checkpoint, then the commands are run on it."""
    page = "docs/checkpoints.md"
    save, read = block(page, "python", "save_checkpoint"), block(page, "python", "def read(")
    check = """
from pathlib import Path as P
import numpy
assert client_state == {"epoch": 3}, client_state
folder = P("runs/mine/global_step2")
want = engine.module.weight.detach().numpy()
numpy.testing.assert_array_equal(read(folder, "weights/weight"), want)
"""
    run_block(ENGINE + TRAIN + save + read + check, tmp_path)
    shutil.copytree(tmp_path / "runs/mine/global_step2", tmp_path / "runs/gpt/step-2")
    run_lines(page, "rayzero ckpt", tmp_path, monkeypatch)
    assert (tmp_path / "out/model.safetensors").is_file()


def test_config_block(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explained, every, of_job, _ = run_lines("docs/config.md", "rayzero", folder, monkeypatch)
    assert len(every) > len(explained) > 0
    assert "zero_optimization.stage" in of_job
    schema = json.loads((folder / "engine.schema.json").read_text(encoding="utf-8"))
    assert "zero_optimization" in schema["properties"]


def test_data_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mixture has the shares of the guide, and the command shows the samples of a step."""
    texts = pa.table({"text": [f"row {row}" for row in range(300)], "other": [0] * 300})
    for folder in ("web", "code"):
        (tmp_path / folder).mkdir()
    pq.write_table(texts, tmp_path / "web" / "0.parquet", row_group_size=50)
    with gzip.open(tmp_path / "code" / "0.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in texts.to_pylist())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block("docs/data.md", "python", "rayzero.data.mix"), names)
    order = names["data"].order(0, 10)
    sources = [order.places(position, 10).sources.tolist() for position in range(0, 100, 10)]
    assert [step.count(1) for step in sources] == [3] * 10
    assert len(list((tmp_path / "indexes").iterdir())) == 2
    counts, step = run_lines("docs/data.md", "rayzero data", tmp_path, monkeypatch)
    assert "1 files, 6 blocks of 50 to 50 rows, 300 rows" in counts
    assert step.splitlines()[-33].startswith("number")


MODELS = """
import torch
def make(): return torch.nn.Linear(64, 64)
def batch(samples): return torch.ones(samples, 64)
"""


def test_plan_block(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    line = next(line for line in README.splitlines() if line.startswith("rayzero plan"))
    done = run_script("-m", *shlex.split(line), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the first that fits in 79.1 GiB" in done.stdout


def test_accelerate_block(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    code = block("docs/huggingface.md", "python", "Accelerator(")
    check = "\nassert accelerator.num_processes == 2, accelerator.state\n"
    done = run_script("-c", code + check, ranks=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


LEDGER = """
from pathlib import Path
import pyarrow, pyarrow.parquet
from rayzero.engine.data.sample_ledger import SampleLedger
from rayzero.engine.data.sampling import SampleOrder
Path("data/stdlib/train").mkdir(parents=True)
tokens = pyarrow.array([1] * 1290, pyarrow.uint8())
pyarrow.parquet.write_table(pyarrow.table({"tokens": tokens}), "data/stdlib/train/0.parquet")
ledger = SampleLedger("runs/gpt-stdlib/ledger", 1, 0, 1)
for step in (1, 2):
    samples = SampleOrder(10, seed=0).indices(4 * (step - 1), 4).tolist()
    ledger.add_samples(samples[SKIPPED:])
    ledger.write_step(step)
"""


def test_ledger_block(tmp_path: Path) -> None:
    """Of a ledger of two steps; a sample that is missing is reported."""
    code = block("docs/faults.md", "python", "check_ledger")
    for name, skipped, exit_code in (("whole", 0, 0), ("damaged", 1, 1)):
        (tmp_path / name).mkdir()
        ledger = LEDGER.replace("SKIPPED", str(skipped))
        done = run_script("-c", ledger + code, cwd=tmp_path / name)
        assert done.returncode == exit_code, done.stderr
        assert ("1 missing" in done.stderr) == bool(skipped)
