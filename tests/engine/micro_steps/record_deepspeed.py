"""Generate `deepspeed_loops.json`: what DeepSpeed 0.19.8 does in each loop, at each stage.

Run manually where DeepSpeed and rayzero's dependencies are installed; about three minutes:
`python -m tests.engine.micro_steps.record_deepspeed [LOOP...]`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from pathlib import Path
from typing import Any

from tests.engine.micro_steps.loops import (
    LOOPS,
    RANKS,
    Run,
    describe,
    make_config,
    make_model,
    own_batches,
)

FILE = Path(__file__).with_name("deepspeed_loops.json")
STAGES = range(4)


def main() -> None:
    recorded = json.loads(FILE.read_text()) if FILE.exists() else {}
    names = sys.argv[1:] or list(LOOPS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    processes = [
        spawn.Process(target=_run_rank, args=(rank, port, names, sender)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    for _ in names:
        name, outcome = receiver.recv()
        recorded[name] = outcome
        ordered = {name: recorded[name] for name in LOOPS if name in recorded}
        FILE.write_text(_as_lines(ordered))
    for process in processes:
        process.join(60)
        process.kill()


def _as_lines(recorded: dict[str, Any]) -> str:
    """One line a row."""
    text = json.dumps(recorded, indent=1)
    for deep in ("\n     ", "\n    "):
        text = text.replace(deep, " ")
    return text + "\n"


def _run_rank(rank: int, port: int, names: list[str], sender: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    import deepspeed  # not a dependency of the project

    deepspeed.ops.__compatible_ops__.clear()  # its collectives in C++ would be compiled
    deepspeed.init_distributed("gloo")
    for name in names:
        outcome = {f"stage {stage}": _record(deepspeed, rank, name, stage) for stage in STAGES}
        if rank == 0:
            sender.send((name, outcome))
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()


def _record(deepspeed: Any, rank: int, name: str, stage: int) -> dict[str, Any]:
    loop, more = LOOPS[name]
    config = make_config(stage, 2) | more
    model = make_model()
    try:
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        return {"error": describe(error), "rows": []}
    batches = own_batches(rank, config["gradient_accumulation_steps"])
    run = Run(engine, batches, deepspeed.zero.GatheredParameters)
    error = run.train(loop)
    engine.destroy()
    return {"error": error, "rows": run.rows}


if __name__ == "__main__":
    main()
