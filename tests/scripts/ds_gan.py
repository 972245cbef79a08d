"""In the shape of DeepSpeedExamples' DCGAN: two engines, two backwards before the critic's step."""

from __future__ import annotations

from argparse import ArgumentParser

import deepspeed
import torch
from corpus import report
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def weights_init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.1)


def train(args) -> None:
    deepspeed.init_distributed()
    torch.manual_seed(999)
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(True), nn.Linear(32, 64), nn.Tanh())
    critic = nn.Sequential(
        nn.Linear(64, 32), nn.LeakyReLU(0.2, inplace=True), nn.Linear(32, 1), nn.Sigmoid()
    )
    generator.apply(weights_init)
    critic.apply(weights_init)
    criterion = nn.BCELoss()

    model_engineD, _optimizerD, _, _ = deepspeed.initialize(
        args=args, model=critic, model_parameters=critic.parameters()
    )
    model_engineG, _optimizerG, _, _ = deepspeed.initialize(
        args=args, model=generator, model_parameters=generator.parameters()
    )
    device = model_engineD.device
    images = torch.tensor(load_digits().data[:256], dtype=torch.float32) / 8 - 1
    dataset = TensorDataset(images)
    loader = DataLoader(
        dataset, batch_size=16, sampler=DistributedSampler(dataset, shuffle=False), drop_last=True
    )
    torch.manual_seed(1 + model_engineD.global_rank)
    losses = []
    for (data,) in loader:
        # the critic: real images, then generated ones
        critic.zero_grad()
        real = data.to(device)
        label = torch.full((real.size(0),), 1.0, device=device)
        errD_real = criterion(model_engineD(real).view(-1), label)
        model_engineD.backward(errD_real)
        noise = torch.randn(real.size(0), 8, device=device)
        fake = model_engineG(noise)
        label.fill_(0.0)
        errD_fake = criterion(model_engineD(fake.detach()).view(-1), label)
        model_engineD.backward(errD_fake)
        model_engineD.step()
        # the generator
        generator.zero_grad()
        label.fill_(1.0)
        errG = criterion(model_engineD(fake).view(-1), label)
        model_engineG.backward(errG)
        model_engineG.step()
        losses.append((errD_real + errD_fake).item())
    report(losses)


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    train(parser.parse_args())
