"""As accelerate's `nlp_example.py`: prepare, accumulate by hand, gather_for_metrics."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from corpus import WORDS, make_tokenizer, report, sentences
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    get_linear_schedule_with_warmup,
    set_seed,
)

MAX_GPU_BATCH_SIZE = 4


def examples() -> list[dict]:
    tokenizer = make_tokenizer()
    texts = sentences(64, words=5)
    return [
        dict(tokenizer(text, texts[i if i % 2 else -i]), labels=int(i % 2))
        for i, text in enumerate(texts)
    ]


def get_dataloaders(accelerator: Accelerator, batch_size: int) -> tuple[DataLoader, DataLoader]:
    tokenizer = make_tokenizer()

    def collate_fn(rows: list[dict]) -> dict:
        return tokenizer.pad(rows, padding="longest", return_tensors="pt")

    with accelerator.main_process_first():
        rows = examples()
    train = DataLoader(rows[:48], shuffle=True, collate_fn=collate_fn, batch_size=batch_size)
    evaluation = DataLoader(rows[48:], shuffle=False, collate_fn=collate_fn, batch_size=5)
    return train, evaluation


def make_model() -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            num_labels=2,
        )
    )


def training_function(config: dict, args: argparse.Namespace) -> None:
    on_cpu = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
    accelerator = Accelerator(mixed_precision=args.mixed_precision, kwargs_handlers=on_cpu)
    batch_size, accumulation = int(config["batch_size"]), 1
    if batch_size > MAX_GPU_BATCH_SIZE:
        accumulation, batch_size = batch_size // MAX_GPU_BATCH_SIZE, MAX_GPU_BATCH_SIZE
    set_seed(int(config["seed"]))
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
    model = make_model().to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    steps = len(train_dataloader) * config["num_epochs"] // accumulation
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, 2, steps)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    losses, accuracy = [], 0.0
    for epoch in range(config["num_epochs"]):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch.to(accelerator.device)
            outputs = model(**batch)
            loss = outputs.loss / accumulation
            accelerator.backward(loss)
            if step % accumulation == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(outputs.loss.detach(), "mean").item())
        model.eval()
        right = seen = 0
        for batch in eval_dataloader:
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            pair = (outputs.logits.argmax(dim=-1), batch["labels"])
            predictions, references = accelerator.gather_for_metrics(pair)
            right, seen = right + (predictions == references).sum().item(), seen + len(references)
        accuracy = right / seen
        accelerator.print(f"epoch {epoch}: {accuracy}")
    accelerator.end_training()
    report(losses, accuracy=accuracy, seen=seen, processes=accelerator.num_processes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"])
    defaults = {"lr": 1e-3, "num_epochs": 2, "seed": 42, "batch_size": 4}
    training_function(defaults, parser.parse_args())
