"""The same training with `import rayzero`, whose loader distributes samples over the ranks:

python -m examples.bert.train_rayzero
torchrun --nproc-per-node 2 -m examples.bert.train_rayzero
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

import rayzero
from examples.bert.data import load
from examples.bert.model import make_model


def main() -> None:
    parser = argparse.ArgumentParser(description="classify snippets of Python source")
    parser.add_argument("--config", default=str(Path(__file__).with_name("ds_config.json")))
    parser.add_argument("--per_kind", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    train_set, test_set = load(args.per_kind)
    engine, _, loader, _ = rayzero.initialize(
        model=make_model(), config=args.config, training_data=train_set
    )
    for epoch in loader.epochs(args.epochs):
        engine.train()
        for step, (ids, mask, labels) in enumerate(loader):
            loss = engine(input_ids=ids, attention_mask=mask, labels=labels).loss
            engine.backward(loss)
            engine.step()
            if step % 50 == 0 and engine.rank == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}", flush=True)

    engine.eval()
    ids, mask, labels = (tensor.to(engine.device) for tensor in test_set.tensors)
    with torch.no_grad():
        logits = engine(input_ids=ids, attention_mask=mask).logits
    if engine.rank == 0:
        accuracy = (logits.argmax(-1) == labels).double().mean().item()
        print(f"accuracy {accuracy:.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
