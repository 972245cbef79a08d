"""The quickstart on a cluster, as written and in order, and what it shows; jobs made in Python."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.token_head import TokenHead, wait_for
from tests.house.test_blocks import Block, blocks, where
from tests.integration.command_server import CommandServer

pytestmark = pytest.mark.slow
TIMEOUT_S = 120
# Of the files: a checkpoint soon, and a port that other tests do not use.
SOONER = {"every_steps: 500": "every_steps: 5", "port: 9400": "port: 0"}


class Terminal:
    """Runs command lines and keeps what they print: `logs -f` beside the others, until `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.head = TokenHead(folder, cpus=4)
        self._commands: CommandServer | None = None
        self._outputs: list[Path] = []
        self._followers: list[subprocess.Popen[bytes]] = []

    def text(self) -> str:
        """All that was printed so far."""
        return "\n".join(path.read_text(encoding="utf-8") for path in self._outputs)

    def new_text(self, before: dict[Path, int]) -> str:
        """What was printed since `sizes` was called."""
        return "\n".join(
            path.read_text(encoding="utf-8")[before.get(path, 0) :] for path in self._outputs
        )

    def sizes(self) -> dict[Path, int]:
        return {path: len(path.read_text(encoding="utf-8")) for path in self._outputs}

    def run(self, line: str) -> None:
        words = shlex.split(line, comments=True)
        if words[:2] == ["ray", "start"] and not self.head.processes():
            self.head.start()
            env = {**self.head.env, "RAY_ADDRESS": self.head.address}
            if self._commands is not None:
                self._commands.close()  # it has the address of the lost one
            self._commands = CommandServer(env, self.folder)
        elif words[0] == "kill":
            pids = re.findall(r"worker 1 is ready on node \S+ \(pid (\d+)\)", self.text())
            psutil.Process(int(pids[-1])).kill()
        elif words[:3] == ["rayzero", "logs", "-f"]:
            self._follow(words)
        elif words[0] == "rayzero":
            self._new_output().write_text(self.rayzero(*words[1:]), encoding="utf-8")
            if "submit" in words:  # a reader waits for it, too
                wait_for(self._is_running, TIMEOUT_S, "both workers")
        else:
            assert words[0] in ("ray", "export"), line  # that head runs, and its address is known

    def rayzero(self, *words: str) -> str:
        assert self._commands is not None
        done = self._commands.run(*words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def lose_cluster(self) -> None:
        wait_for(self._is_running, TIMEOUT_S, "both workers")
        self.kill_cluster()

    def kill_cluster(self) -> None:
        self._end_followers()
        self.head.kill()

    def close(self) -> None:
        if self._commands is not None:
            self._commands.close()
        self.kill_cluster()

    def _is_running(self) -> bool:
        status = json.loads(self.rayzero("status", "quick", "--json"))
        return status["state"] == "running" and status["world_size"] == 2

    def _new_output(self) -> Path:
        self._outputs.append(self.folder / f"output-{len(self._outputs)}")
        return self._outputs[-1]

    def _follow(self, words: list[str]) -> None:
        env = {**self.head.env, "RAY_ADDRESS": self.head.address}
        with self._new_output().open("wb") as output:
            command = [sys.executable, "-m", *words]
            self._followers.append(
                subprocess.Popen(command, cwd=self.folder, env=env, stdout=output, stderr=output)
            )

    def python(self, code: str) -> subprocess.Popen[str]:
        """A script beside the files that its job needs."""
        (self.folder / "script.py").write_text(code, encoding="utf-8")
        return subprocess.Popen(
            [sys.executable, "script.py"],
            cwd=self.folder,
            env={**self.head.env, "RAY_ADDRESS": self.head.address},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _end_followers(self) -> None:
        for follower in self._followers:
            follower.kill()
            follower.wait(20)
        self._followers.clear()


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path_factory.mktemp("guides"))
    terminal.run("ray start --head")
    yield terminal
    terminal.close()


def exchanges(page: str, after: str) -> Iterator[tuple[Block, list[str]]]:
    """Blocks of commands, each with the lines that the page shows of what they print."""
    commands, shown = None, list[str]()
    begun = False
    for block in blocks(page):
        begun = begun or after in block.text
        if block.language == "bash":
            if commands is not None:
                yield commands, shown
            commands, shown = (block if begun else None), []
        elif block.language == "text":
            shown = shown + [line for line in block.text.splitlines() if line != "..."]
    if commands is not None:
        yield commands, shown


def without_numbers(text: str) -> set[str]:
    """Its lines without what differs from run to run: numbers, names of machines, folders."""
    text = re.sub(r"on node \S+", "on node", text)
    text = re.sub(r"from \S*/runs", "from runs", text)
    text = re.sub(r"(goodput|, offline for|^step \d+ \|).*", r"\1", text, flags=re.MULTILINE)
    text = re.sub(r"\b\d+ ms\b", "0 s", text)
    text = re.sub(r"\d[\d.,]*|no(?= step)", "#", text)
    return {
        re.sub(r"\b(step|worker)s\b", r"\1", " ".join(line.split())) for line in text.splitlines()
    }


@pytest.mark.timeout(600)
def test_quickstart_runs_as_written(terminal: Terminal) -> None:
    """Its kill of a worker and its loss of the cluster included."""
    page = "docs/quickstart.md"
    for block in blocks(page):
        if block.file:
            text = block.text
            for given, ours in SOONER.items():
                text = text.replace(given, ours)
            (terminal.folder / block.file).write_text(text, encoding="utf-8")
    for commands, shown in exchanges(page, after="ray start --head"):
        if any("lost at step" in line for line in shown):
            terminal.lose_cluster()
        before = terminal.sizes()
        for line in commands.lines():
            terminal.run(line)
        wanted = without_numbers("\n".join(shown))
        try:
            wait_for(
                lambda: wanted <= without_numbers(terminal.new_text(before)),  # noqa: B023
                TIMEOUT_S,
                "the lines that the page shows",
            )
        except TimeoutError:
            printed = terminal.new_text(before)
            pytest.fail(f"{wanted - without_numbers(printed)} not in:\n{printed}")


TRAIN = """
import time, torch, rayzero

def train(ctx):
    model = torch.nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.ones(64, 4))
    engine, _, loader, _ = rayzero.initialize(model=model, training_data=data)
    for (rows,) in loader.until(ctx.steps):
        engine.backward(engine(rows).mean())
        engine.step()
        time.sleep(0.02)
"""
ENGINE = {"train_batch_size": 24, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}


@pytest.mark.timeout(300)
def test_jobs_in_python_run_as_written(terminal: Terminal) -> None:
    """README's, then that of the guide to jobs, with its commands about a running job."""
    for block in blocks("README.md"):
        if block.file:
            (terminal.folder / block.file).write_text(block.text, encoding="utf-8")
    (code,) = (block.text for block in blocks("README.md") if "rayzero.Job(" in block.text)
    printed, _ = terminal.python(code).communicate(timeout=TIMEOUT_S)
    assert re.search(r"'last': 0\.095\d+}$", printed.strip()), printed
    (terminal.folder / "train.py").write_text(TRAIN, encoding="utf-8")
    (terminal.folder / "engine.json").write_text(json.dumps(ENGINE), encoding="utf-8")
    start, attach = (b.text for b in blocks("docs/jobs.md") if b.language == "python")
    job = terminal.python(start)
    wait_for(lambda: "gpt: running" in terminal.rayzero("ls"), TIMEOUT_S, "the job")
    attached, _ = terminal.python(f"import rayzero\n{attach}").communicate(timeout=TIMEOUT_S)
    assert re.search(r"^\d+ (running|resizing)$", attached, re.MULTILINE), attached
    place = "tests/integration/test_guide_sessions.py::test_jobs_in_python_run_as_written"
    lines = [line for b in blocks("docs/jobs.md") if b.language == "bash" for line in b.lines()]
    for line in (line for line in lines if where("docs/jobs.md", line) == place):
        terminal.run(line)
    printed, _ = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, printed
    assert "'steps': 500" in printed
    assert "'faults': {'lost': 1}" in printed  # by `rayzero chaos`
