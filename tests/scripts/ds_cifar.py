"""As DeepSpeedExamples' CIFAR tutorial: images, `training_data`, a config as a dict."""

from __future__ import annotations

import argparse

import deepspeed
import torch
import torch.nn.functional as F
from corpus import report
from deepspeed.accelerator import get_accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def add_argument() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="digits")
    parser.add_argument("-e", "--epochs", default=4, type=int)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--dtype", default="fp32", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--stage", default=0, type=int, choices=[0, 1, 2, 3])
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def get_ds_config(args: argparse.Namespace) -> dict:
    return {
        "train_batch_size": 32,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.003, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.003, "warmup_num_steps": 10},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {
            "enabled": args.dtype == "fp16",
            "fp16_master_weights_and_grads": False,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": args.stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    }


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 2)
        self.fc1 = nn.Linear(16, 32)
        self.fc3 = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return self.fc3(F.relu(self.fc1(x.flatten(1))))


def test(model_engine, testset, local_device, target_dtype) -> float:
    correct = total = 0
    model_engine.eval()
    with torch.no_grad():
        for images, labels in DataLoader(testset, batch_size=32, shuffle=False):
            if target_dtype is not None:
                images = images.to(target_dtype)
            outputs = model_engine(images.to(local_device))
            _, predicted = torch.max(outputs.data, 1)
            total += labels.size(0)
            correct += (predicted == labels.to(local_device)).sum().item()
    return correct / total


def main(args: argparse.Namespace) -> None:
    deepspeed.init_distributed()
    get_accelerator().set_device(get_accelerator().current_device())
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    data = TensorDataset(images, torch.tensor(digits.target))
    trainset = torch.utils.data.Subset(data, range(512))
    testset = torch.utils.data.Subset(data, range(512, 768))
    if torch.distributed.get_rank() != 0:
        torch.distributed.barrier()  # others wait while rank 0 downloads
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()

    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, _optimizer, trainloader, __ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=parameters,
        training_data=trainset,
        config=get_ds_config(args),
    )
    local_device = get_accelerator().device_name(model_engine.local_rank)
    target_dtype = None
    if model_engine.bfloat16_enabled():
        target_dtype = torch.bfloat16
    elif model_engine.fp16_enabled():
        target_dtype = torch.half
    criterion = nn.CrossEntropyLoss()

    losses = []
    for _epoch in range(args.epochs):
        running_loss = 0.0
        for _i, batch in enumerate(trainloader):
            inputs, labels = batch[0].to(local_device), batch[1].to(local_device)
            if target_dtype is not None:
                inputs = inputs.to(target_dtype)
            outputs = model_engine(inputs)
            loss = criterion(outputs, labels)
            model_engine.backward(loss)
            model_engine.step()
            running_loss += loss.item()
        losses.append(running_loss / (_i + 1))
    report(losses, accuracy=test(model_engine, testset, local_device, target_dtype))


if __name__ == "__main__":
    main(add_argument())
