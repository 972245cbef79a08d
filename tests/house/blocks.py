"""Which test runs each code block of README.md and docs, as data.

A bash line is run by the test that `BASH` names for the longest beginning that fits, or is not run,
for a stated reason. Text blocks are what commands print.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.house.source import ROOT

PAGES = ("README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md")))
README = "tests/examples/test_readme.py"
FIRST = f"{README}::test_first_script_reproduces_documented_losses"
KILL = f"{README}::test_kill_of_the_first_job_is_repaired_as_shown"
QUICKSTART = "tests/integration/test_guide_sessions.py::test_quickstart_runs_as_written"
JOBS = "tests/integration/test_guide_sessions.py::test_jobs_in_python_run_as_written"
COMMANDS = "tests/integration/test_guide_sessions.py::test_commands_of_a_job_run_as_written"
LAUNCHED = "tests/huggingface/test_launched_scripts.py"
INSTALLED = "tests/deploy/test_guide.py"
CHAT = "tests/examples/test_rlhf_chat.py"
NOT_RUN = "not run: "
PYTHON = {
    "README.md": FIRST,
    "docs/quickstart.md": QUICKSTART,
    "docs/jobs.md": JOBS,
    "docs/checkpoints.md": f"{README}::test_checkpoint_blocks",
    "docs/data.md": f"{README}::test_data_blocks",
    "docs/faults.md": f"{README}::test_ledger_block",
    "docs/huggingface.md": f"{README}::test_accelerate_block",
    "docs/from-ray-train.md": JOBS,
    "docs/vllm.md": "tests/vllm/test_guide.py",
}
BASH = {
    "README.md": {
        "rayzero": COMMANDS,
        "pip install": f"{NOT_RUN}tests/deploy/test_image.py installs by the same constraints",
        "rayzero launch": LAUNCHED,
        "torchrun --nproc-per-node 2 -m": "tests/huggingface/test_scripts.py",
        "make": f"{NOT_RUN}these are the demo and this suite, as CI starts them",
        "python first.py": FIRST,
        "torchrun --nproc-per-node 2 first.py": FIRST,
        "rayzero run job.yaml --set 'faults": KILL,
        "python -m rayzero.deepspeed": "tests/deepspeed/test_install.py",
        "torchrun --nproc-per-node 8": f"{NOT_RUN}needs 8 devices; with 2 in tests/huggingface",
        "kill -9": f"{NOT_RUN}the demo takes 80 s; test_kill_of_the_first_job is the same",
        "rayzero plan": f"{README}::test_plan_block",
        "helm": INSTALLED,
    },
    "docs/quickstart.md": {
        "": QUICKSTART,
        "python3.11": f"{NOT_RUN}Makefile's setup, as CI starts it",
        "pip install": f"{NOT_RUN}tests/deploy/test_image.py installs by the same constraints",
        "rayzero doctor": "tests/integration/test_command.py",
    },
    "docs/jobs.md": {
        "rayzero": COMMANDS,
        "rayzero stop quick": QUICKSTART,
        "rayzero launch": LAUNCHED,
        "rayzero launch --workers 4 --autotuning": "tests/integration/test_command.py",
        "ray job": "tests/benchmarks/test_end_to_end.py",
    },
    "docs/checkpoints.md": {"rayzero": f"{README}::test_checkpoint_blocks"},
    "docs/config.md": {"rayzero": f"{README}::test_config_block"},
    "docs/data.md": {"rayzero": f"{README}::test_data_blocks"},
    "docs/faults.md": {
        "rayzero": COMMANDS,
        "rayzero run job.yaml --set 'faults": f"{NOT_RUN}README's with another step, run by KILL",
    },
    "docs/from-rlhf.md": {
        "python -m examples.rlhf.chat": f"{CHAT}::test_the_guides_commands",
    },
    "docs/huggingface.md": {
        "rayzero launch": LAUNCHED,
        "torchrun": "tests/huggingface/test_scripts.py",
        "python": "tests/huggingface/test_scripts.py",
    },
    "docs/kubernetes.md": {
        "kubectl": INSTALLED,
        "helm install": INSTALLED,
        "helm repo": f"{NOT_RUN}KubeRay's own chart, from the network",
        "helm install kuberay": f"{NOT_RUN}KubeRay's own chart, from the network",
        "helm test": f"{NOT_RUN}needs a cluster; tests/deploy/test_scenarios.py checks its pod",
        "docker": f"{NOT_RUN}needs docker; tests/deploy/test_image.py runs its commands",
        "export": f"{NOT_RUN}needs the secret of a cluster",
        "rayzero": COMMANDS,
    },
}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the name of the file that it is, if any."""

    language: str
    text: str
    file: str

    def lines(self) -> list[str]:
        """Its command lines, without comments."""
        joined = self.text.replace("\\\n", " ").splitlines()
        return [line for line in joined if line.strip() and not line.lstrip().startswith("#")]


BLOCK = re.compile(r"^(?P<indent> *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"`([\w.]+\.(?:py|json|yaml))`[^`]*:\s*$|`([\w.]+\.py)`\. It[^`]*:\s*$")


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        named = FILE.search(text[: match.start()])
        indent = len(match["indent"])
        lines = [line[indent:] for line in match[3].splitlines()]
        name = next(filter(None, named.groups()), "") if named else ""
        yield Block(match[2], "\n".join(lines) + "\n", name)


def where(page: str, line: str) -> str:
    """The test that runs a bash line, or why none does."""
    rows = BASH.get(page, {})
    fitting = [beginning for beginning in rows if line.strip().startswith(beginning)]
    return rows[max(fitting, key=len)] if fitting else ""
