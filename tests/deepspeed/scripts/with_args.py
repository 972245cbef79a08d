"""A tutorial script written for DeepSpeed, without any reference to rayzero."""

import argparse
import json

import deepspeed
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 17)

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def add_argument():
    parser = argparse.ArgumentParser(description="tutorial")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", type=str)
    parser.add_argument("--loop", type=str)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = add_argument()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Net()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 17, (24, 6), generator=generator)
    dataset = TensorDataset(tokens)
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=12 // deepspeed.comm.get_world_size(), sampler=sampler)
    losses = []

    if args.loop == "config":
        model_engine, _, _, _ = deepspeed.initialize(
            args=None, model=model, config_params=args.deepspeed_config
        )
    elif args.loop == "args":
        model_engine, _, _, _ = deepspeed.initialize(
            args=args, model=model, model_parameters=model.parameters()
        )
    else:
        model_engine, _, _, _ = deepspeed.initialize(
            model=model, model_parameters=model.parameters()
        )

    for _ in range(args.epochs):
        for (batch,) in loader:
            input_ids = batch[:, :-1].to(
                model_engine.local_rank if torch.cuda.is_available() else "cpu"
            )
            labels = batch[:, 1:].to(input_ids.device)
            # forward() method
            loss = model_engine(input_ids, labels=labels)
            # runs backpropagation
            model_engine.backward(loss)
            # weight update
            model_engine.step()
            total = loss.detach().clone()
            torch.distributed.all_reduce(total)
            losses.append(total.item() / torch.distributed.get_world_size())

    if torch.distributed.get_rank() == 0:
        print(json.dumps({"losses": losses, "version": deepspeed.__version__}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
