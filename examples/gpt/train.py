"""Pre-trains a byte-level GPT on the source of Python's standard library.

    rayzero run examples/gpt/job.yaml

`train` runs on every worker, and stays in its loop after a fault or a resize: the loader yields the
samples of a lost step again. In a new worker `ctx.initialize` returns an engine with the job's
current state.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from examples.gpt.model import GPT, GPTConfig
from examples.gpt.prepare import prepare
from rayzero import ParquetTokens

if TYPE_CHECKING:
    from rayzero import Context, Engine

VALIDATION_BATCHES = 16
VALIDATION_BATCH_SIZE = 8


def train(ctx: Context) -> dict[str, Any]:
    """Train for `ctx.steps` steps and write the weights to `ctx.output_dir`.

    Returns:
        entries for the job's summary, on rank 0.
    """
    args = {"data": "data/stdlib", "context": 128, **ctx.args}
    data = Path(args.pop("data"))
    config = GPTConfig(**args)
    prepare_data(data, ctx.local_rank)
    train_set = ParquetTokens(data / "train", config.context)
    validation_set = ParquetTokens(data / "validation", config.context)

    torch.manual_seed(ctx.seed)
    model = GPT(config)
    engine, _, loader, _ = ctx.initialize(
        model=model, model_parameters=model.parameters(), training_data=train_set
    )

    first_validation = ctx.output_dir / "validation.json"  # must survive repeated calls
    if engine.progress.step == 0:
        first = bits_per_byte(engine, validation_set, ctx)
        if ctx.is_main:
            first_validation.write_text(json.dumps({"first": first}))

    for batch in loader.until(ctx.steps):
        inputs, targets = batch[:, :-1], batch[:, 1:]
        loss = engine(inputs, targets)
        engine.backward(loss)
        ctx.report(tokens=targets.numel())
        engine.step()

    last = bits_per_byte(engine, validation_set, ctx)
    weights = engine.state_dict()  # collective; only rank 0 receives the weights
    if not ctx.is_main:
        return {}
    if config.tie:
        del weights["head.weight"]  # tied to token.weight; safetensors rejects shared tensors
    save_file(weights, ctx.output_dir / "weights.safetensors")
    return {
        "validation_bits_per_byte": {**json.loads(first_validation.read_text()), "last": last},
        "weights": str(ctx.output_dir / "weights.safetensors"),
    }


def prepare_data(folder: Path, local_rank: int) -> None:
    """Prepare the data once per node, unless it exists."""
    if local_rank == 0 and not (folder / "train").is_dir():
        prepare(folder)
    if dist.is_initialized():
        dist.barrier()


@torch.no_grad()
def bits_per_byte(engine: Engine, dataset: ParquetTokens, ctx: Context) -> float:
    """Mean loss over evenly spaced samples of `dataset`, the same ones at any world size.

    Batches are distributed over the ranks. A rank without a remaining batch repeats one and ignores
    the result: at stage 3 the forward pass is collective, so all ranks must call it equally often.
    """
    engine.eval()
    samples = VALIDATION_BATCHES * VALIDATION_BATCH_SIZE
    total = torch.zeros((), device=ctx.device)
    for round_number in range(math.ceil(VALIDATION_BATCHES / ctx.world_size)):
        number = round_number * ctx.world_size + ctx.rank
        first = number % VALIDATION_BATCHES * VALIDATION_BATCH_SIZE
        batch = torch.stack(
            [
                dataset[k * len(dataset) // samples]
                for k in range(first, first + VALIDATION_BATCH_SIZE)
            ]
        ).to(ctx.device)
        loss = engine(batch[:, :-1], batch[:, 1:])
        if number < VALIDATION_BATCHES:
            total += loss
    if dist.is_initialized():
        dist.all_reduce(total)
    engine.train()
    bits = total.item() / VALIDATION_BATCHES / math.log(2)
    if ctx.is_main:
        print(f"validation: {bits:.2f} bits per byte", flush=True)
    return bits
