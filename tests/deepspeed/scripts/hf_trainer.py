"""transformers' Trainer with a DeepSpeed config, on a model and data that `plain_steps` shares.

An epoch is one step: every sample once, whatever the order and the number of ranks.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

SAMPLES, LENGTH, VOCABULARY, STEPS, LR = 16, 8, 61, 6, 1e-2


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random token sequences; counts how often each is read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        self.reads = [0] * SAMPLES

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.reads[index] += 1
        return {"input_ids": self.ids[index], "labels": labels(self.ids[index])}


def labels(ids: torch.Tensor) -> torch.Tensor:
    """Without the first token, which is not predicted: Trainer divides by the number of labels."""
    return ids.index_fill(-1, torch.tensor([0]), -100)


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**sizes, **no_dropout, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).double()


def plain_steps(steps: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, final weights) of torch's AdamW in one process."""
    model, ids = make_model(), Tokens().ids
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=labels(ids)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def ds_config(stage: int, *, own_optimizer: bool) -> dict[str, Any]:
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config: dict[str, Any] = dict.fromkeys((*sizes, "gradient_clipping"), "auto")
    if own_optimizer:
        names = ("lr", "betas", "eps", "weight_decay")
        config["optimizer"] = {"type": "AdamW", "params": dict.fromkeys(names, "auto")}
    zero = {"stage": stage, "reduce_bucket_size": "auto"}
    return config | {
        "zero_optimization": zero | {"stage3_gather_16bit_weights_on_model_save": True}
    }


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def main(stage: int, folder: str, stop_at: int, resume: bool, own_optimizer: bool) -> None:
    arguments = TrainingArguments(
        folder,
        deepspeed=ds_config(stage, own_optimizer=own_optimizer),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        save_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        logging_steps=1,
        load_best_model_at_end=stop_at == STEPS,
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
    )
    data = Tokens()
    trainer = Trainer(
        model=make_model(),
        args=arguments,
        train_dataset=data,
        eval_dataset=Tokens(),
        callbacks=[StopAt(stop_at)],
    )
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model(f"{folder}/final")
    if trainer.is_world_process_zero():
        history = trainer.state.log_history
        losses = [entry["loss"] for entry in history if "loss" in entry]
        evals = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
        print(json.dumps({"losses": losses, "evals": evals, "reads": data.reads}))


if __name__ == "__main__":
    stage, folder, stop_at, *flags = sys.argv[1:]
    main(int(stage), folder, int(stop_at), "resume" in flags, "torch" not in flags)
