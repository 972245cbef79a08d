"""The `rayzero` command line: output, exit codes, signals, no leaked processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.engine.checkpoint.saving import save
from tests.integration.conftest import CPUS, Head

ROOT = Path(__file__).resolve().parents[2]
RUN_ENV = "RAYZERO_TEST_COMMAND"
JOBS = "tests.integration.jobs.plain"
RAYZERO = (sys.executable, "-m", "rayzero")


class Shell:
    """Starts rayzero with an environment variable that identifies all descendant processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_id = uuid.uuid4().hex
        self.env = {**os.environ, RUN_ENV: self.run_id, "RAY_AUTH_MODE": "disabled"}
        self.env.pop("RAY_ADDRESS", None)

    def job_file(self, function: str, **changes: Any) -> Path:
        document = {
            "name": "job",
            "entrypoint": f"{JOBS}:{function}",
            "workers": {"min": 2},
            "steps": 10,
            "checkpoint": {"path": str(self.folder)},
            **changes,
        }
        path = self.folder / "job.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    def start(self, *args: object, cwd: Path = ROOT) -> subprocess.Popen[str]:
        command = [*RAYZERO, *map(str, args)]
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a separate process group, as in a terminal
        )

    def run(self, *args: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        process = self.start(*args, cwd=cwd)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def find_processes(self) -> list[psutil.Process]:
        """Running processes that were started by this shell."""
        processes = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(RUN_ENV) == self.run_id:
                    processes.append(process)
            except psutil.Error:
                continue
        return processes


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    deadline = time.monotonic() + 60
    while shell.find_processes() and time.monotonic() < deadline:
        time.sleep(0.5)  # long, since each check inspects every process
    leaked = [(process.pid, process.cmdline()) for process in shell.find_processes()]
    for process in shell.find_processes():
        process.kill()
    assert leaked == []


@pytest.mark.parametrize("words", [("--help",), ("ckpt", "ls", "step-9", "--json")])
def test_command_without_a_job_imports_no_ray_or_torch(tmp_path: Path, words: tuple[str, ...]):
    save(tmp_path, 9)
    code = (
        "import sys, contextlib\n"
        "from rayzero.__main__ import main\n"
        f"sys.argv = {['rayzero', *words]}\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "print(sorted({'ray', 'torch', 'pyarrow'} & set(sys.modules)))\n"
        "print('pydantic' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "step" in done.stdout
    assert done.stdout.splitlines()[-2:] == ["[]", str(words[0] == "ckpt")]


@pytest.mark.slow
def test_job_that_exceeds_the_machine_fails_immediately(shell: Shell):
    done = shell.run("run", shell.job_file("train_forever", workers={"min": 4096}))
    assert done.returncode == 1
    assert "of at least 4096 workers" in done.stderr
    assert done.stderr.count("error:") == 1


def start_job(shell: Shell, function: str, workers: int) -> subprocess.Popen[str]:
    """Start a job on a local cluster and wait for its first step event."""
    process = shell.start("run", shell.job_file(function, workers={"min": workers}), "--json")
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == "step":
            return process
    raise AssertionError(process.communicate()[1])


@pytest.mark.slow
def test_interrupted_job_stops_cleanly(shell: Shell):
    """The training function unwinds, on a local cluster that is stopped with the job."""
    process = start_job(shell, "train_forever", 2)
    os.killpg(process.pid, signal.SIGINT)  # a terminal signals the whole group
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    events = [json.loads(line) for line in out.splitlines()]
    assert events[-1]["kind"] == "JobStoppedError"
    unwound = {event["rank"] for event in events if event.get("text") == "unwound"}
    assert unwound == {0, 1}, "stopped, not killed"


@pytest.mark.slow
def test_interrupt_during_cluster_start(shell: Shell):
    process = shell.start("run", shell.job_file("train_forever"), "--json")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["event"] == "job"
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "")


@pytest.mark.slow
def test_second_signal_kills_job_and_its_cluster(shell: Shell):
    process = start_job(shell, "ignore_interrupts", 1)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None, "the training function has no interrupt point"
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        os.kill(process.pid, signal.SIGINT)  # repeated: signals in quick succession coalesce
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
    assert process.returncode == 130
    deadline = time.monotonic() + 60
    while shell.find_processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert shell.find_processes() == []


@pytest.mark.slow
def test_failed_job_exits_with_1_and_prints_user_frames(shell: Shell, head: Head):
    done = shell.run(
        "run", shell.job_file("raise_error", args={"fail_step": 3}), "--address", head.address
    )
    assert done.returncode == 1
    assert "failed in step 3 on rank 1" in done.stderr
    assert 'raise ValueError("the data has a hole")' in done.stderr
    assert "controller.py" not in done.stderr


@pytest.mark.slow
def test_import_error_exits_with_2_and_prints_user_frames(shell: Shell, head: Head):
    done = shell.run(
        "run",
        shell.job_file("", entrypoint="tests.workers.broken:helper", workers={"min": 1}),
        "--address",
        head.address,
    )
    assert done.returncode == 2
    assert "cannot be imported: ZeroDivisionError" in done.stderr
    assert "VALUE = helper(None)" in done.stderr
    assert "controller.py" not in done.stderr


@pytest.mark.slow
def test_ray_job_submit(shell: Shell, head: Head):
    """`--working-dir` uploads the job file and the user's modules, some of which are named like
    rayzero's packages; Ray sets RAY_ADDRESS. Events are text."""
    folder = shell.folder / "project"
    folder.mkdir()
    for name in ("engine", "workers", "orchestrator"):
        (folder / f"{name}.py").write_text("USER = True\n")
    (folder / "user_code.py").write_text(
        "from pathlib import Path\n"
        "import engine, workers\n"
        "def train(ctx):\n"
        "    print('user', engine.USER, workers.USER, Path('job.yaml').exists())\n"
        "    ctx.report(step=1, loss=0.5)\n"
    )
    path = shell.job_file("", entrypoint="user_code:train", workers={"min": 1})
    path.rename(folder / "job.yaml")
    submit = ("job", "submit", "--address", head.dashboard, "--working-dir", str(folder), "--")
    done = subprocess.run(
        [Path(sys.executable).with_name("ray"), *submit, *RAYZERO, "run", "job.yaml"],
        env=shell.env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[rank 0] user True True True" in done.stdout
    assert "\nstep 1/10 | loss 0.5000" in done.stdout
    assert f"\nsummary: {shell.folder}/job/summary.json" in done.stdout
    assert json.loads((shell.folder / "job" / "summary.json").read_text())["steps"] == 1


@pytest.mark.slow
def test_doctor_checks_a_cluster(shell: Shell, head: Head) -> None:
    """A real cluster, all-reduce and disk."""
    shell.env["PYTHONPATH"] = str(ROOT)
    done = shell.run("doctor", "--json", "--address", head.address, cwd=shell.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = json.loads(done.stdout)["findings"]
    found = {finding["name"]: finding for finding in findings}
    checked = [finding["seen"] for finding in findings if finding["name"] == "health"]
    assert [text.partition(" ")[0] for text in checked] == ["this", "node"], checked
    assert all("GFLOP/s, memory bandwidth" in text for text in checked), checked
    levels = [found[name]["level"] for name in ("torch", "gloo", "cluster", "checkpoints")]
    assert levels == ["ok"] * 4
    assert found["cluster"]["seen"].startswith(f"1 nodes, {CPUS} CPUs")


TUNED_SCRIPT = """\
import deepspeed, torch
from torch.utils.data import TensorDataset
tuning = {
    "enabled": True, "num_tuning_micro_batch_sizes": 2,
    "start_profile_step": 1, "end_profile_step": 2,
}
engine, _, loader, _ = deepspeed.initialize(
    model=torch.nn.Linear(8, 1), training_data=TensorDataset(torch.ones(32, 8)),
    config={"train_micro_batch_size_per_gpu": 16, "optimizer": {"type": "SGD"},
            "zero_optimization": {"stage": 2}, "autotuning": tuning},
)
for (rows,) in loader:
    if len(rows) == 2:  # the memory of a device that is smaller than was estimated
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    engine.backward(engine(rows).mean())
    engine.step()
    print("micro-batch", len(rows), flush=True)
"""


@pytest.mark.slow
def test_autotuning_tries_settings_and_trains_with_the_best(shell: Shell, head: Head):
    (shell.folder / "train.py").write_text(TUNED_SCRIPT)
    flags = ("--autotuning", "run", "--address", head.address)
    done = shell.run("launch", *flags, "train.py", cwd=shell.folder)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"z2-mbs1: \S+ samples/s, \S+ s a step", lines[0])
    assert lines[1] == "z2-mbs2: out of memory"
    assert "[rank 0] micro-batch 1" in lines  # the job itself, in whose config it is 16
    assert json.loads((shell.folder / "runs/train/summary.json").read_text())["steps"] == 32
    best = json.loads((shell.folder / "autotuning_results/ds_config_optimal.json").read_text())
    assert best["train_micro_batch_size_per_gpu"] == 1
    kept = json.loads((shell.folder / "autotuning_exps/train-z2-mbs2.json").read_text())
    assert kept["out_of_memory"]
