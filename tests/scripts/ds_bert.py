"""As HelloDeepSpeed: masked words, checkpoints in numbered folders, resumed by path."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Iterator

import deepspeed
import torch
from corpus import WORDS, make_tokenizer, report, sentences
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import RobertaConfig
from transformers.models.roberta.modeling_roberta import RobertaModel


class MaskedWords(Dataset):
    def __init__(self, count: int, length: int = 16) -> None:
        ids = make_tokenizer()(
            sentences(count), padding="max_length", truncation=True, max_length=length
        )
        self.ids = torch.tensor(ids["input_ids"])
        generator = torch.Generator().manual_seed(1)
        self.masked = (torch.rand(self.ids.shape, generator=generator) < 0.15) & (self.ids > 3)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, masked = self.ids[index], self.masked[index]
        return {
            "src_tokens": ids.masked_fill(masked, 1),
            "attention_mask": (ids != 0).long(),
            "tgt_tokens": ids.masked_fill(~masked, 0),
        }


class RobertaMLMModel(nn.Module):
    def __init__(self, config: RobertaConfig, encoder: RobertaModel) -> None:
        super().__init__()
        self.encoder = encoder
        self.lm_head = nn.Sequential(
            nn.Linear(config.hidden_size, config.hidden_size), nn.GELU(),
            nn.Linear(config.hidden_size, config.vocab_size),
        )  # fmt: skip
        self.lm_head.apply(encoder._init_weights)

    def forward(self, src_tokens, attention_mask, tgt_tokens) -> torch.Tensor:
        output = self.encoder(input_ids=src_tokens, attention_mask=attention_mask, return_dict=True)
        logits = self.lm_head(output["last_hidden_state"])
        loss = nn.CrossEntropyLoss(ignore_index=0)
        return loss(logits.view(-1, logits.size(-1)), tgt_tokens.view(-1))


def create_data_iterator(batch_size: int, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(MaskedWords(64), batch_size, shuffle=True, generator=generator)
    while True:
        yield from loader


def train(args: argparse.Namespace) -> None:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=40, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = RobertaMLMModel(config, RobertaModel(config, add_pooling_layer=False))
    ds_config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": args.stage, "offload_optimizer": {"device": "cpu"}},
    }
    model, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config
    )
    start_step = 1
    if args.load_checkpoint_dir:
        _, client_state = model.load_checkpoint(load_dir=args.load_checkpoint_dir)
        start_step = client_state["checkpoint_step"] + 1

    device = get_accelerator().device_name(model.local_rank)
    iterator = create_data_iterator(args.batch_size, seed=model.global_rank)
    model.train()
    losses = []
    for step, batch in enumerate(iterator, start=start_step):
        if step > args.num_iterations:
            break
        for key, value in batch.items():
            batch[key] = value.to(device)
        loss = model(**batch)
        model.backward(loss)
        model.step()
        losses.append(loss.item())
        if step % args.checkpoint_every == 0:
            model.save_checkpoint(
                save_dir=args.checkpoint_dir, client_state={"checkpoint_step": step}
            )
            latest = pathlib.Path(args.checkpoint_dir, "latest").read_text().strip()
            deepspeed.utils.log_dist(json.dumps({"saved": latest}), ranks=[0])
    report(losses, start=start_step)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint_dir", required=True)
    parser.add_argument("--load_checkpoint_dir")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--num_iterations", type=int, default=12)
    parser.add_argument("--checkpoint_every", type=int, default=6)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--local_rank", type=int, default=-1)
    train(parser.parse_args())
