"""Runs Python scripts in processes forked from the tests' fork server, which has imported torch.

Only the interpreter's start and these imports are left out, which cost seconds per process.
`tests/huggingface/test_scripts.py` starts real ones.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.processes import PROCESSES

ROOT = Path(__file__).parents[2]


def run_script(
    *arguments: str, ranks: int = 0, cwd: Path = ROOT, timeout_s: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS`: `-c code`, `-m module ...` or `script.py ...`.

    Args:
        ranks: number of processes with the variables that torchrun sets; 0: one without them.

    Returns:
        The joint output of all processes, and the first exit code that is not 0.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks else None
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        processes = []
        for rank in range(max(ranks, 1)):
            variables = _torchrun_variables(rank, ranks, store.port) if store else {}
            inputs: tuple[Any, ...] = (arguments, variables, cwd, outputs)
            processes.append(PROCESSES.Process(target=_run, args=inputs, daemon=True))
            processes[-1].start()
        deadline_s = time.monotonic() + timeout_s
        try:
            for process in processes:
                process.join(max(deadline_s - time.monotonic(), 0))
            late = [rank for rank, process in enumerate(processes) if process.is_alive()]
            texts = [path.read_text() for path in outputs]
            assert not late, f"ranks {late} did not finish: {texts[1][-3000:]}"
            code = next((process.exitcode for process in processes if process.exitcode), 0)
        finally:
            for process in processes:
                process.kill()
                process.join(10)
    return subprocess.CompletedProcess(arguments, code or 0, *texts)


def _torchrun_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
        **{name: str(ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store is not rank 0's but of the process that starts the ranks.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "none",
    }


def _run(arguments: list[str], variables: dict[str, str], cwd: Path, outputs: list[Path]) -> None:
    """Main function of a process: replaces what differs from `python ARGUMENTS`."""
    for path, number in zip(outputs, (1, 2), strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):  # of an outer torchrun
        os.environ.pop(name, None)
    os.environ.update(variables, CUDA_VISIBLE_DEVICES="")
    torch.set_num_threads(1)
    gc.freeze()  # excludes imported modules: libraries make many collections
    os.chdir(cwd)
    try:
        _execute(*arguments)
    except SystemExit:
        raise
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()  # a child of multiprocessing skips them


def _execute(first: str, *rest: str) -> None:
    if first == "-c":
        sys.argv = [first, *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = list(rest)
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")
