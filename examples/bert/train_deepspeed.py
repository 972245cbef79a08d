"""A training script written for DeepSpeed, without any reference to rayzero:

python -m rayzero.deepspeed examples/bert/train_deepspeed.py --deepspeed_config FILE
torchrun --nproc-per-node 2 -m rayzero.deepspeed examples/bert/train_deepspeed.py ...
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler

from examples.bert.data import load
from examples.bert.model import make_model


def main() -> None:
    parser = argparse.ArgumentParser(description="classify snippets of Python source")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--per_kind", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=2)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    train_set, test_set = load(args.per_kind)
    model = make_model()
    model_engine, _, _, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters()
    )
    batch_size = model_engine.train_micro_batch_size_per_gpu()
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler, drop_last=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model_engine.train()
        for step, batch in enumerate(loader):
            ids, mask, labels = (tensor.to(model_engine.device) for tensor in batch)
            loss = model_engine(input_ids=ids, attention_mask=mask, labels=labels).loss
            model_engine.backward(loss)
            model_engine.step()
            if step % 50 == 0 and deepspeed.comm.get_rank() == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}", flush=True)

    model_engine.eval()
    counts = torch.zeros(2, device=model_engine.device)
    with torch.no_grad():
        for batch in DataLoader(test_set, batch_size=64, sampler=DistributedSampler(test_set)):
            ids, mask, labels = (tensor.to(model_engine.device) for tensor in batch)
            logits = model_engine(input_ids=ids, attention_mask=mask).logits
            counts += torch.stack(((logits.argmax(-1) == labels).sum(), torch.tensor(len(labels))))
    deepspeed.comm.all_reduce(counts)
    if deepspeed.comm.get_rank() == 0:
        print(f"accuracy {(counts[0] / counts[1]).item():.4f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
