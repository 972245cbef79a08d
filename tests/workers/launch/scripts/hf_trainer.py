"""transformers' Trainer over a DeepSpeed config, or without one; one of its ranks is killed once,
while it trains. Without one it also runs by itself, under torchrun.

Writes each sample that it reads, its log and its final weights to a folder.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from common import Blocks, Iterable, kill_once, note
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import rayzero.data

LENGTH, VOCABULARY = 8, 61
USED: list[tuple[int, list[Any]]] = []
"""What the current step has read, with the number of lost steps before."""


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(0, VOCABULARY, (options.samples, LENGTH), generator=generator)

    def __len__(self) -> int:
        return options.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index], "number": index}


class Model(GPT2LMHeadModel):
    def forward(self, number: torch.Tensor, **inputs: Any) -> Any:
        if self.training:
            engine = trainer.model_wrapped
            lost = getattr(getattr(engine, "progress", None), "lost_steps", 0)
            step = getattr(engine, "global_steps", trainer.state.global_step)
            used = [time.time(), step, number.tolist()]
            USED.append((lost, used))
            time.sleep(0 if (OUT / "fast").exists() else options.pace_s)
        labels, items = inputs.pop("labels"), inputs.pop("num_items_in_batch", None)
        outputs = super().forward(**inputs)
        # transformers' loss rounds the logits to float32.
        kept, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        total = nn.functional.cross_entropy(kept, wanted, reduction="sum")
        outputs.loss = total / (wanted.numel() if items is None else items)
        return outputs


class Watch(TrainerCallback):
    """Kills rank 1 when so many steps are finished, in the middle of the next one; or while it
    evaluates."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at = kill_at

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.kill_if(state.global_step == self.kill_at)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.kill_if(0 < state.global_step == options.kill_evaluation)

    def kill_if(self, due: bool) -> None:
        if due and os.environ["RANK"] == "1":
            kill_once(OUT)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for lost, used in USED:
            if lost == USED[-1][0]:  # else it is of a step that was lost, and run again
                note(OUT, "used", used)
        USED.clear()
        note(OUT, "steps", [time.time(), state.global_step])
        control.should_training_stop |= state.global_step == options.stop_at

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        note(OUT, "epoch_ends", state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        note(OUT, "evaluations", state.global_step)


class KilledTrainer(Trainer):
    """Kills rank 1 before its best model is loaded, or once it is, after the last step."""

    def _load_best_model(self) -> None:
        self.kill_if("before")
        super()._load_best_model()
        note(OUT, "best", self.state.best_model_checkpoint)
        self.kill_if("after")

    def kill_if(self, when: str) -> None:
        if (options.kill_best, os.environ["RANK"]) == (when, "1"):
            kill_once(OUT)


parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--kill-at", type=int, default=-1)
parser.add_argument("--best", action="store_true", help="the model of the first evaluation")
parser.add_argument("--kill-evaluation", type=int, default=-1, help="of that step")
parser.add_argument("--kill-best", choices=["before", "after"], help="that is loaded")
parser.add_argument("--stop-at", type=int, default=-1, help="that step, before the last one")
parser.add_argument("--stage", type=int, default=2)
parser.add_argument("--plain", action="store_true", help="no config")
parser.add_argument("--resume", help="a checkpoint of Trainer's")
parser.add_argument("--samples", type=int, default=24)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--steps", type=int, default=-1)
parser.add_argument("--data", choices=["", "stream", "iterable"], default="")
parser.add_argument("--every", type=int, default=4, help="steps between evaluations and saves")
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--pace-s", type=float, default=0.0)
options = parser.parse_args()
OUT = options.out
note(OUT, "entries", time.time())

torch.manual_seed(1)
sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_head": 2}
sizes |= {"n_embd": options.width, "n_layer": options.layers}
dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), options.dropout)
names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
config = {
    **dict.fromkeys((*names, "gradient_clipping"), "auto"),
    "zero_optimization": {"stage": options.stage},
}
DATA: dict[str, Any] = {
    "": Tokens,
    "stream": lambda: rayzero.data.stream(
        Blocks(options.samples), shuffle_window=3, transform=lambda row: Tokens()[row["number"]]
    ),
    "iterable": lambda: Iterable(Tokens()),
}
trainer = KilledTrainer(
    model=Model(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0)).double(),
    args=TrainingArguments(
        str(OUT / "output"),
        deepspeed=None if options.plain else config,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2 // int(os.environ["WORLD_SIZE"]),  # of the first entry
        num_train_epochs=options.epochs,
        max_steps=options.steps,
        learning_rate=options.lr,
        adam_epsilon=1e-2,  # some gradients are zero but for rounding, which Adam would scale up
        lr_scheduler_type="linear",
        save_strategy="steps",
        save_steps=options.every,
        eval_strategy="steps",
        eval_steps=options.every,
        load_best_model_at_end=options.best,
        greater_is_better=True if options.best else None,  # of the loss, which falls
        logging_steps=3,
        report_to=[],
        use_cpu=not options.plain or "TORCHELASTIC_RUN_ID" in os.environ,  # torchrun's
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
    ),
    train_dataset=DATA[options.data](),
    eval_dataset=Tokens(),
    callbacks=[Watch(options.kill_at)],
)
if options.plain and "TORCHELASTIC_RUN_ID" not in os.environ:  # there, ranks then train alone
    note(OUT, "before", trainer.evaluate()["eval_loss"])
trainer.train(options.resume)
note(OUT, "weights", [value.tolist() for value in trainer.model.state_dict().values()])
logged = [(it["step"], name, it[name]) for it in trainer.state.log_history for name in it]
note(OUT, "log", [it for it in logged if it[1] in ("loss", "eval_loss", "train_loss")])
