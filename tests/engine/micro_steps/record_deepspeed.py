"""Generate `deepspeed_loops.json`: what DeepSpeed 0.19.8 does in each loop, at each stage.

Run manually where DeepSpeed and rayzero's dependencies are installed; about three minutes:
`python -m tests.engine.micro_steps.record_deepspeed [LOOP...]`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch.multiprocessing import spawn

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
    with tempfile.TemporaryDirectory() as folder:
        spawn(_run_rank, (f"file://{folder}/store", sys.argv[1:] or list(LOOPS)), RANKS)


def _as_lines(recorded: dict[str, Any]) -> str:
    """One line a row."""
    text = json.dumps(recorded, indent=1)
    for deep in ("\n     ", "\n    "):
        text = text.replace(deep, " ")
    return text + "\n"


def _run_rank(rank: int, store: str, names: list[str]) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    import deepspeed  # not a dependency of the project

    deepspeed.ops.__compatible_ops__.clear()  # its collectives in C++ would be compiled
    deepspeed.init_distributed("gloo", init_method=store, rank=rank, world_size=RANKS)
    recorded = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in names:
        recorded[name] = {
            f"stage {stage}": _record(deepspeed, rank, name, stage) for stage in STAGES
        }
        if rank == 0:
            FILE.write_text(_as_lines({it: recorded[it] for it in LOOPS if it in recorded}))
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
