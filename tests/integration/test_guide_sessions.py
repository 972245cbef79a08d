"""The quickstart on a cluster, as written and in order, and what it shows; jobs made in Python."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from select import select
from shutil import rmtree

import psutil
import pytest
import yaml

from tests.house.blocks import Block, blocks, where
from tests.integration.command_server import CommandServer
from tests.support.token_head import TokenHead, wait_for

pytestmark = pytest.mark.slow
TIMEOUT_S = 240
# Of the files: a checkpoint soon, a port that other tests do not use, steps that leave CPU time.
HERE = "tests/integration/test_guide_sessions.py"
ADDRESS = r"http://(HOST|127\.0\.0\.1):8265"
PACED = ("engine.step()", "engine.step(); __import__('time').sleep(0.15)")
SOONER = [("every_steps: 500", "every_steps: 20"), ("port: 9400", "port: 0"), PACED]


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
        return self.new_text({})

    def new_text(self, before: dict[Path, int]) -> str:
        """What was printed since `sizes` was called."""
        return "\n".join(
            path.read_text(encoding="utf-8", errors="replace")[before.get(path, 0) :]
            for path in self._outputs
        )

    def sizes(self) -> dict[Path, int]:
        return {path: len(path.read_text("utf-8", "replace")) for path in self._outputs}

    def run(self, line: str) -> None:
        """Of `run` and `resume`, whatever they print; of `logs -f`, until `close`."""
        words = shlex.split(line, comments=True)
        if words[0] == "rayzero":
            words = [re.sub(ADDRESS, self.head.dashboard, word) for word in words]
        if words[:2] == ["ray", "start"] and not self.head.processes():
            self.head.start()
            env = {**self.head.env, "RAY_ADDRESS": self.head.address}
            if self._commands is not None:
                self._commands.close()  # it has the address of the lost one
            self._commands = CommandServer(env, self.folder)
        elif words[0] == "kill":
            pids = re.findall(r"worker 1 is ready on node \S+ \(pid (\d+)\)", self.text())
            psutil.Process(int(pids[-1])).kill()
        elif words[1] in ("run", "resume", "page") or words[:3] == ["rayzero", "logs", "-f"]:
            self._follow([sys.executable, "-m", *words], self._env(words))
        elif words[0] == "rayzero":
            self._new_output().write_text(self.rayzero(*words[1:]), encoding="utf-8")
            if "submit" in words:  # a reader waits for it, too
                self.wait_running()
        else:
            assert words[0] in ("ray", "export"), line  # that head runs, and its address is known

    def rayzero(self, *words: str) -> str:
        assert self._commands is not None
        if "--address" in words:
            command = [sys.executable, "-m", "rayzero", *words]
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=self._env(words),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        else:
            done = self._commands.run(*words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def _env(self, words: Sequence[str]) -> dict[str, str]:
        """A command that names its cluster is given where RAY_ADDRESS names another, lost one."""
        address = "127.0.0.1:1" if "--address" in words else self.head.address
        return {**self.head.env, "RAY_ADDRESS": address, "TERM": "xterm"}

    def is_listed(self, name: str, state: str) -> bool:
        rows = self.rayzero("ls").splitlines()
        return [name, state] in [row.split()[:2] for row in rows]

    def kill_cluster(self) -> None:
        self._end_followers()
        self.head.kill()

    def close(self) -> None:
        if self._commands is not None:
            self._commands.close()
        self._end_followers()
        self.head.close()

    def wait_running(self) -> None:
        """Returns when the job of `job.yaml` trains on both workers."""
        name = yaml.safe_load((self.folder / "job.yaml").read_text())["name"]

        def is_running() -> bool:
            status = json.loads(self.rayzero("status", name, "--json"))
            runs = status["state"] == "running" and status["step"] > 0
            return bool(runs and status["world_size"] == 2)

        wait_for(is_running, TIMEOUT_S, "both workers")

    def wait_printed(self, pattern: str, before: dict[Path, int]) -> None:
        """Returns when something was printed since `before` in which the pattern is found."""
        try:
            wait_for(lambda: re.search(pattern, self.new_text(before)), TIMEOUT_S, pattern)
        except TimeoutError:
            pytest.fail(f"{pattern!r} not in:\n{self.new_text(before)}")

    def look(self, line: str, pattern: str) -> None:
        """Runs a command in a terminal until it shows the pattern."""
        screen, child = pty.openpty()
        words = [sys.executable, "-m", *shlex.split(line, comments=True)]
        env = self._env(words)
        shown = subprocess.Popen(words, cwd=self.folder, env=env, stdout=child, stderr=child)
        os.close(child)
        text, deadline_s = "", time.monotonic() + TIMEOUT_S
        try:
            while not re.search(pattern, text) and time.monotonic() < deadline_s:
                if select([screen], [], [], 1.0)[0]:
                    text += os.read(screen, 4096).decode(errors="replace")
        except OSError:
            pass  # it has ended
        finally:
            shown.kill()
            shown.wait(20)
            os.close(screen)
        assert re.search(pattern, text), text

    def _new_output(self) -> Path:
        self._outputs.append(self.folder / f"output-{len(self._outputs)}")
        return self._outputs[-1]

    def _follow(self, command: list[str], env: dict[str, str]) -> None:
        with self._new_output().open("wb") as output:
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
    text = re.sub(r"(killed by SIGKILL,).*", r"\1", text)
    text = re.sub(r"from \S*/runs", "from runs", text)
    text = re.sub(r"(goodput|, offline for|^step \d+ \|).*", r"\1", text, flags=re.MULTILINE)
    text = re.sub(r"\b\d+ ms\b|\b\d+ min \d+ s\b", "0 s", text)
    text = re.sub(r"\d[\d.,]*|no(?= step)", "#", text)
    return {
        re.sub(r"\b(step|worker)s\b", r"\1", " ".join(line.split())) for line in text.splitlines()
    }


@pytest.mark.timeout(900)
def test_quickstart_runs_as_written(terminal: Terminal) -> None:
    """Its kill of a worker and its loss of the cluster included."""
    page = "docs/quickstart.md"
    write_files(terminal, page, *SOONER)
    for commands, shown in exchanges(page, after="ray start --head"):
        if any(re.search(r" lost .* resume ", line) for line in shown):
            terminal.wait_running()
            terminal.kill_cluster()
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
from pathlib import Path

def train(ctx):
    model = torch.nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.ones(64, 4))
    engine, _, loader, _ = rayzero.initialize(model=model, training_data=data)
    for (rows,) in loader.until(ctx.steps):
        engine.backward(engine(rows).mean())
        engine.step()
        time.sleep(0.01 if Path("attached").exists() else 1)
"""
ENGINE = {"train_batch_size": 24, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}


@pytest.mark.timeout(900)
def test_jobs_in_python_run_as_written(terminal: Terminal) -> None:
    """README's, the one that was Ray Train's (whose own script takes 35 s: not run), then that of
    the guide to jobs."""
    write_files(terminal, "README.md")
    (code,) = (block.text for block in blocks("README.md") if "rayzero.Job(" in block.text)
    printed, _ = terminal.python(code).communicate(timeout=TIMEOUT_S)
    assert re.search(r"'last': 0\.095\d+}$", printed.strip()), printed
    (code,) = (it.text for it in blocks("docs/from-ray-train.md") if "rayzero.Job(" in it.text)
    printed, _ = terminal.python(code).communicate(timeout=TIMEOUT_S)
    assert re.search(r"^{'first': 12\.611\d+, 'last': 0\.0958\d+}$", printed, re.MULTILINE), printed
    (terminal.folder / "train.py").write_text(TRAIN, encoding="utf-8")
    (terminal.folder / "engine.json").write_text(json.dumps(ENGINE), encoding="utf-8")
    start, _, attach = (b.text for b in blocks("docs/jobs.md") if "rayzero.Job" in b.text)
    job = terminal.python(start.replace("steps=500", "steps=60"))
    wait_for(lambda: terminal.is_listed("gpt", "running"), TIMEOUT_S, "the job")
    attached, _ = terminal.python(f"import rayzero\n{attach}").communicate(timeout=TIMEOUT_S)
    assert re.search(r"^\d+ (running|resizing)$", attached, re.MULTILINE), attached
    (terminal.folder / "attached").touch()
    printed, _ = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, printed
    assert "'steps': 60" in printed


COMMANDS = f"{HERE}::test_commands_of_a_job_run_as_written"
GUIDES = ("README.md", "docs/jobs.md", "docs/kubernetes.md", "docs/faults.md")
NAMES = ("gpt", "gpt-stdlib", "quick")
SHOWN = {
    "ls": "first +running",
    "status": "running",
    "logs": r"step \d+|epoch \d+",
    "stop": "stop",
    "submit": "first",
    "chaos": r"kill\(rank",
    "scale": "workers? wanted",
    "page": "http://127.0.0.1:9500/",
    "top": r"first\b[^$]*step",
}
"""What is found in the output of a command about the running job `first`."""


def guides_commands() -> dict[str, list[str]]:
    """README's and the guides' lines by command, each once, about jobs called `first`."""
    lines: dict[str, list[str]] = {}
    for page in GUIDES:
        for block in blocks(page):
            for line in block.lines() if block.language == "bash" else ():
                if where(page, line) == COMMANDS:
                    words = shlex.split(line, comments=True)
                    line = shlex.join("first" if word in NAMES else word for word in words)
                    lines.setdefault(words[1], [])
                    lines[words[1]] += [] if line in lines[words[1]] else [line]
    return lines


def perform(terminal: Terminal, line: str) -> None:
    """One command about the running job, and what is seen of it."""
    before = terminal.sizes()
    command = line.split()[1]
    if command == "top":
        terminal.look(line, SHOWN[command])
        return
    terminal.run(line)
    terminal.wait_printed(SHOWN[command], before)
    if command == "page":
        with urllib.request.urlopen("http://127.0.0.1:9500/", timeout=20) as page:
            assert b"<html" in page.read()
    elif command == "stop":
        wait_for(lambda: terminal.is_listed("first", "stopped"), TIMEOUT_S, "its end")


def write_files(terminal: Terminal, page: str, *changes: tuple[str, str]) -> None:
    for block in blocks(page):
        if text := block.text if block.file else "":
            for old, new in changes:
                text = text.replace(old, new)
            (terminal.folder / block.file).write_text(text, encoding="utf-8")


@pytest.mark.timeout(900)
def test_commands_of_a_job_run_as_written(terminal: Terminal) -> None:
    """Those of README and of the guides to jobs, Kubernetes and faults, about one job that is lost
    with its cluster and resumed; then the ones that run it to its end."""
    rmtree(terminal.folder / "runs", ignore_errors=True)  # of other jobs of that name
    write_files(terminal, "README.md", ("epochs(5)", "epochs(500)"), PACED)
    commands = guides_commands()
    changed = [line for line in commands["submit"] if "--set" in line]
    for line in sorted(commands["submit"], key=lambda it: "--address" in it):  # those attach
        if line not in changed:
            perform(terminal, line)
    for command in ("ls", "status", "logs", "top", "page", "chaos"):
        for line in commands[command]:
            perform(terminal, line)
    terminal.wait_printed(r"repaired in [\s\S]*resized in", {})
    for line in commands["scale"]:
        perform(terminal, line)
    terminal.kill_cluster()
    terminal.run("ray start --head")
    for line in commands["resume"]:
        before = terminal.sizes()
        terminal.run(line)
        terminal.wait_printed("adopted a lost run", before)
    for line in (*commands["stop"], *changed, *commands["stop"]):
        perform(terminal, line)
    assert re.search(r"was stopped after step \d+, and saved nothing", terminal.text())
    rmtree(terminal.folder / "runs")  # else a job goes on from a checkpoint of its name
    write_files(terminal, "README.md")
    for line in commands["run"]:
        before = terminal.sizes()
        terminal.run(line)
        terminal.wait_printed(r"succeeded: 80 steps .* to 0\.095", before)
