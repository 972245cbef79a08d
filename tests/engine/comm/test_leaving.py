"""Gloo's threads are over before the interpreter is, also behind a torch optimizer's first step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = """
import atexit, contextlib, os, sys

def threads():
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found.append(open(f"/proc/self/task/{task}/comm").read().strip())
    return found

def tell():
    with open(f"{sys.argv[2]}/left-{os.environ['RANK']}", "w") as file:
        file.write(" ".join(threads()))

atexit.register(tell)  # registered first: called last

import rayzero, torch
from rayzero.engine.comm.process_group import init_distributed
import torch.distributed as dist

if sys.argv[1] == "ours":
    init_distributed()
elif sys.argv[1] == "script's":
    dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = {"type": "SGD", "params": {"lr": 0.1}}
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer}
engine = rayzero.initialize(model=model, config=config)[0]
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
dist.all_reduce(torch.ones(3))
assert "pt_gloo_runloop" in threads()
if sys.argv[1] == "script's":
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["ours", "script's", "found"])
def test_no_thread_of_gloo_outlives_the_script(whose: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    launched = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *launched, str(tmp_path / "script.py"), whose, str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    left = [(tmp_path / f"left-{rank}").read_text().split() for rank in range(2)]
    assert all("python" in threads for threads in left)
    assert not any("pt_gloo_runloop" in threads for threads in left)
