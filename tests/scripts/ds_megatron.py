"""A Megatron-like loop: an own optimizer and schedule, groups by weight decay, activation
checkpointing, an own sampler of samples, evaluation, checkpoints with the schedule's state."""

from __future__ import annotations

import argparse
import math

import deepspeed
import torch
from corpus import gpt2_config, make_tokenizer, report, sentences
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.utils import see_memory_usage
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel


class Transformer(nn.Module):
    """GPT-2's blocks, each under `deepspeed.checkpointing.checkpoint`."""

    def __init__(self) -> None:
        super().__init__()
        full = GPT2LMHeadModel(gpt2_config())
        self.body, self.head = full.transformer, nn.Linear(32, full.config.vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        hidden = self.body.wte(tokens) + self.body.wpe(positions)
        for block in self.body.h:
            output = deepspeed.checkpointing.checkpoint(block, hidden)
            hidden = output[0] if isinstance(output, tuple) else output
        return self.head(self.body.ln_f(hidden))


class AnnealingLR:
    """Megatron's schedule: warm-up, then cosine; the engine steps it and saves its state."""

    def __init__(self, optimizer, start_lr: float, warmup: int, end: int) -> None:
        self.optimizer, self.start_lr, self.warmup, self.end = optimizer, start_lr, warmup, end
        self.num_iters = 0
        self.step(0)

    def get_lr(self) -> float:
        if self.num_iters <= self.warmup:
            return self.start_lr * self.num_iters / self.warmup
        share = (self.num_iters - self.warmup) / (self.end - self.warmup)
        return self.start_lr / 2.0 * (math.cos(math.pi * min(share, 1.0)) + 1)

    def step(self, step_num: int | None = None) -> None:
        self.num_iters = self.num_iters + 1 if step_num is None else step_num
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr()

    def state_dict(self) -> dict:
        return {"num_iters": self.num_iters, "start_lr": self.start_lr}

    def load_state_dict(self, sd: dict) -> None:
        self.start_lr = sd["start_lr"]
        self.step(sd["num_iters"])


def get_params_for_weight_decay_optimization(module: nn.Module) -> tuple[dict, dict]:
    decay = {"params": []}
    no_decay = {"params": [], "weight_decay": 0.0}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                norm = isinstance(part, nn.LayerNorm) or name == "bias"
                (no_decay if norm else decay)["params"].append(parameter)
    return decay, no_decay


def get_batch(tokens: torch.Tensor, step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    start = (step * micro * world + rank * micro) % (len(tokens) - micro)
    batch = tokens[start : start + micro]
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def forward_step(tokens: torch.Tensor, model, step: int, args) -> torch.Tensor:
    inputs, labels = get_batch(tokens, step, args.batch_size)
    output = model(inputs.to(model.device))
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten().to(model.device))


def train_step(tokens: torch.Tensor, model, step: int, args) -> torch.Tensor:
    for micro in range(model.gradient_accumulation_steps()):
        loss = forward_step(tokens, model, 2 * step + micro, args)
        model.backward(loss)
        model.step()
    reduced = loss.detach().clone()
    deepspeed.comm.all_reduce(reduced)
    return reduced / deepspeed.comm.get_world_size()


def main(args: argparse.Namespace) -> None:
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    deepspeed.checkpointing.configure(None, deepspeed_config=args.deepspeed_config)
    torch.manual_seed(1234)
    model = Transformer()
    see_memory_usage("before initialize", force=True)
    groups = get_params_for_weight_decay_optimization(model)
    optimizer = FusedAdam(groups, lr=args.lr, weight_decay=0.01)
    scheduler = AnnealingLR(optimizer, args.lr, warmup=2, end=20)
    model, optimizer, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, args=args, lr_scheduler=scheduler, mpu=None,
        dist_init_required=False,
    )  # fmt: skip
    iteration = 0
    if args.load:
        load_dir, sd = model.load_checkpoint(args.load)
        iteration = sd["iteration"]
        deepspeed.log_dist(f"loaded {load_dir}", ranks=[0])
    ids = make_tokenizer()(" ".join(sentences(200)))["input_ids"]
    tokens = torch.tensor(ids[: len(ids) // 17 * 17]).view(-1, 17)

    losses = []
    model.train()
    while iteration < args.train_iters:
        losses.append(train_step(tokens, model, iteration, args).item())
        iteration += 1
        if iteration % args.save_interval == 0:
            model.save_checkpoint(
                args.save, tag=f"iter_{iteration}", client_state={"iteration": iteration}
            )
    model.eval()
    with torch.no_grad():
        valid = sum(forward_step(tokens, model, step, args).item() for step in range(3)) / 3
    see_memory_usage("after training", force=True)
    report(losses, valid=valid, lr=model.get_lr())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--train-iters", type=int, default=12)
    parser.add_argument("--save-interval", type=int, default=6)
    parser.add_argument("--save", required=True)
    parser.add_argument("--load")
    parser.add_argument("--local_rank", type=int, default=None)
    main(deepspeed.add_config_arguments(parser).parse_args())
