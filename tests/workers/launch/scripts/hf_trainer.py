"""transformers' Trainer over a DeepSpeed config; one of its ranks is killed once, while it trains.

Writes each sample that it reads, its log and its final weights to a folder.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

SAMPLES, LENGTH, VOCABULARY, EPOCHS = 24, 8, 61, 2


def note(folder: Path, name: str, value: object) -> None:
    with (folder / f"{name}-{os.environ['RANK']}").open("a") as file:
        file.write(json.dumps(value) + "\n")


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index], "number": index}


class Model(GPT2LMHeadModel):
    def forward(self, number: torch.Tensor, **inputs: Any) -> Any:
        if self.training:
            entries = len((OUT / f"entries-{os.environ['RANK']}").read_text().splitlines())
            note(OUT, "used", [entries, trainer.state.global_step, number.tolist()])
        return super().forward(**inputs)


class Watch(TrainerCallback):
    """Kills rank 1 when so many steps are finished, in the middle of the next one."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at = kill_at

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (state.global_step, os.environ["RANK"]) == (self.kill_at, "1"):
            (OUT / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        note(OUT, "steps", state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        note(OUT, "evaluations", state.global_step)


parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--kill-at", type=int, default=-1)
parser.add_argument("--stage", type=int, default=2)
options = parser.parse_args()
OUT = options.out
note(OUT, "entries", os.environ["WORLD_SIZE"])

torch.manual_seed(1)
sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
trainer = Trainer(
    model=Model(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0)).double(),
    args=TrainingArguments(
        str(OUT / "output"),
        deepspeed={
            **dict.fromkeys((*names, "gradient_clipping"), "auto"),
            "zero_optimization": {"stage": options.stage},
        },
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2 // int(os.environ["WORLD_SIZE"]),  # of the first entry
        num_train_epochs=EPOCHS,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        save_strategy="steps",
        save_steps=4,
        eval_strategy="steps",
        eval_steps=4,
        logging_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    ),
    train_dataset=Tokens(),
    eval_dataset=Tokens(),
    callbacks=[Watch(options.kill_at)],
)
trainer.train()
note(OUT, "weights", [value.tolist() for value in trainer.model.state_dict().values()])
history = [{**it, "loss": it.get("loss", it.get("eval_loss"))} for it in trainer.state.log_history]
note(OUT, "log", [(it["step"], it["loss"]) for it in history if it["loss"] is not None])
