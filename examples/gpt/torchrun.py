"""The same training without Ray, on one machine or many:

    torchrun --nproc-per-node 2 -m examples.gpt.torchrun

or `python -m examples.gpt.torchrun` for a single process.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rayzero
from examples.gpt.train import train

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Context:
    """The context of `train`, from torchrun's environment variables."""

    args: dict[str, Any]
    steps: int
    output_dir: Path
    seed: int = 0
    rank: int = int(os.environ.get("RANK", "0"))
    world_size: int = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank: int = int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        return (
            torch.device("cuda", self.local_rank)
            if torch.cuda.is_available()
            else torch.device("cpu")
        )

    def initialize(self, **kwargs: Any) -> tuple[Any, ...]:
        return rayzero.initialize(config=FOLDER / "engine.json", **kwargs)

    def report(self, **metrics: float) -> None:
        """Ignored: there is no job to report to."""


def main() -> None:
    parser = argparse.ArgumentParser(description="train the byte-level GPT under torchrun")
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--out", type=Path, default=Path("runs/gpt-torchrun"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    ctx = Context({"layers": 4, "width": 256, "heads": 4}, options.steps, options.out)
    if ctx.device.type == "cuda":
        torch.cuda.set_device(ctx.device)
    if ctx.world_size > 1:
        dist.init_process_group("nccl" if ctx.device.type == "cuda" else "gloo")
    summary = train(ctx)  # type: ignore[arg-type]
    if ctx.is_main:
        print(summary)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
