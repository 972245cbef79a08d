"""Trains a byte-level GPT on a stream: a mixture of two sources in an object store.

    rayzero run examples/streams/job.yaml

A worker that is killed, a repair, a resize: the loader goes on with the samples that no finished
step has had, in the order that the job would have had without it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import rayzero.data
from examples.gpt.model import GPT, GPTConfig

if TYPE_CHECKING:
    from rayzero import Context
    from rayzero.data import BlockStream

SHARES = {"code": 0.75, "docs": 0.25}
PADDING = 0  # no text has this byte


def open_data(url: str, context: int) -> BlockStream:
    """The mixture of `code/` and `docs/` in a folder or bucket, as sequences of
    `context + 1` bytes."""
    top, mark, options = url.partition("?")
    sources = {}
    for name, share in SHARES.items():
        source = rayzero.data.blocks(f"{top}/{name}{mark}{options}", columns=["text"])
        sequences = rayzero.data.stream(source, transform=partial(to_bytes, length=context + 1))
        sources[name] = (sequences, share)
    return rayzero.data.mix(sources, cache_bytes=64 << 20)


def to_bytes(row: dict[str, Any], length: int) -> Tensor:
    """The bytes of a row's text, cut or padded to one length: int64, shape (length,)."""
    content = row["text"].encode()[:length]
    return torch.tensor([*content, *[PADDING] * (length - len(content))])


def train(ctx: Context) -> dict[str, Any]:
    """Trains for `ctx.steps` steps. Returns entries for the job's summary, on rank 0."""
    args = dict(ctx.args)
    data = open_data(args.pop("data"), args["context"])
    torch.manual_seed(ctx.seed)
    model = GPT(GPTConfig(**args))
    engine, _, loader, _ = ctx.initialize(
        model=model, model_parameters=model.parameters(), training_data=data
    )
    loss = None
    for batch in loader.until(ctx.steps):
        targets = batch[:, 1:].masked_fill(batch[:, 1:] == PADDING, -100)  # no loss there
        loss = engine(batch[:, :-1], targets)
        engine.backward(loss)
        ctx.report(tokens=targets.numel())
        engine.step()
    return {} if loss is None else {"last_loss": loss.item()}
