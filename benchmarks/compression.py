"""Communication volume and step time with each compression of gradients and weights.

Each round times one step of every engine, so that machine noise affects all of them equally.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

import rayzero
from examples.gpt.model import GPT, GPTConfig

MODEL = GPTConfig(vocab=4096, context=128, layers=4, width=256, heads=4)
TOKENS = 128


def _gradients(name: str, **options: Any) -> dict[str, Any]:
    return {"rayzero": {"compression": {"gradients": name} | options}}


SYSTEMS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 2": (2, {}),
    "stage 2, fp16": (2, _gradients("fp16")),
    "stage 2, bf16": (2, _gradients("bf16")),
    "stage 2, int8": (2, _gradients("int8")),
    "stage 2, sign": (2, _gradients("sign")),
    "stage 2, lowrank (4)": (2, _gradients("lowrank", rank=4)),
    "stage 0": (0, {}),
    "stage 0, int8": (0, _gradients("int8")),
    "stage 0, sign": (0, _gradients("sign")),
    "stage 3": (3, {}),
    "stage 3, int8 weights": (3, {"zero_quantized_weights": True}),
    "stage 3, second shards in pairs": (3, {"zero_hpz_partition_size": 2}),
}


def make_engine(name: str) -> rayzero.Engine:
    """Create an engine for a new replica of the model."""
    torch.manual_seed(0)
    stage, changes = SYSTEMS[name]
    rayzero_config = {key: value for key, value in changes.items() if key == "rayzero"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage}
        | {key: value for key, value in changes.items() if key not in rayzero_config},
    } | rayzero_config
    engine, *_ = rayzero.initialize(model=GPT(MODEL), config=config)
    return engine


def step(engine: rayzero.Engine, tokens: torch.Tensor) -> float:
    """Duration of one step on the slowest rank."""
    dist.barrier()
    start = perf_counter()
    engine.backward(engine(tokens[:, :-1], targets=tokens[:, 1:]))
    engine.step()
    seconds = torch.tensor(perf_counter() - start)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def bytes_sent(engine: rayzero.Engine) -> dict[str, int]:
    """Total bytes by collective."""
    return {name: traffic["bytes"] for name, traffic in engine.metrics.collectives.items()}


def run(rank: int, ranks: int, rounds: int, store: str, shared: bool) -> None:
    """Main function of a rank; rank 0 prints the table."""
    torch.set_num_threads(1)
    os.environ["RAYZERO_SHARED_MEMORY"] = str(int(shared))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    engines = {name: make_engine(name) for name in SYSTEMS}
    generator = torch.Generator().manual_seed(rank)
    seconds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    before: dict[str, dict[str, int]] = {}
    for number in range(rounds + 2):
        tokens = torch.randint(0, MODEL.vocab, (1, TOKENS + 1), generator=generator)
        for name, engine in engines.items():
            if number == 2:
                before[name] = bytes_sent(engine)
            seconds[name].append(step(engine, tokens))
    if rank == 0:
        table = Table("", "MB a step", "median s", "min s")
        for name, engine in engines.items():
            total = sum(bytes_sent(engine).values()) - sum(before[name].values())
            times = seconds[name][2:]
            megabytes = total / rounds / 1e6
            table.add_row(name, f"{megabytes:.2f}", f"{median(times):.4f}", f"{min(times):.4f}")
        Console(width=100).print(table)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--messages", action="store_true", help="no shared memory: over TCP")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        arguments = (options.ranks, options.rounds, store, not options.messages)
        mp.spawn(run, args=arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
