"""In the shape of LLaVA's training script: a frozen image tower, a projector, LoRA written by hand
through `maybe_zero_3`, which reads DeepSpeed's attributes of parameters."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from corpus import gpt2_config, make_tokenizer, report
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def maybe_zero_3(param: torch.Tensor, ignore_status: bool = False, name: str | None = None):
    from deepspeed import zero
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if hasattr(param, "ds_id"):
        if param.ds_status == ZeroParamStatus.NOT_AVAILABLE and not ignore_status:
            print(f"{name}: param.ds_status != ZeroParamStatus.NOT_AVAILABLE: {param.ds_status}")
        with zero.GatheredParameters([param]):
            param = param.data.detach().cpu().clone()
    else:
        param = param.detach().cpu().clone()
    return param


def get_mm_adapter_state_maybe_zero_3(named_params, keys_to_match: list[str]) -> dict:
    chosen = {k: t for k, t in named_params if any(key in k for key in keys_to_match)}
    return {k: maybe_zero_3(v, ignore_status=True, name=k).cpu() for k, v in chosen.items()}


class ImagesWithText(Dataset):
    def __init__(self, count: int) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images[:count], dtype=torch.float32) / 8 - 1
        self.labels = digits.target[:count]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> dict:
        ids = torch.tensor([2, 10 + int(self.labels[i]), 3])  # <s> label </s>
        return {"images": self.images[i], "input_ids": ids, "labels": ids}


class LlavaModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32))
        self.mm_projector = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
        self.language_model = GPT2LMHeadModel(gpt2_config())
        self.config = self.language_model.config

    def forward(self, images, input_ids, labels):
        patches = images.unfold(1, 4, 4).unfold(2, 4, 4).flatten(3).flatten(1, 2)
        with torch.no_grad():
            features = self.vision_tower(patches)
        image = self.mm_projector(features)
        text = self.language_model.get_input_embeddings()(input_ids)
        ignored = labels.new_full(image.shape[:2], -100)
        return self.language_model(
            inputs_embeds=torch.cat([image, text], dim=1),
            labels=torch.cat([ignored, labels], dim=1),
        )


class LlavaTrainer(Trainer):
    def _save_checkpoint(self, model, trial) -> None:
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        weights = get_mm_adapter_state_maybe_zero_3(
            self.model.named_parameters(), ["mm_projector", "vision_resampler"]
        )
        if self.args.local_rank in (0, -1):
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(weights, folder / "mm_projector.bin")


def main(args: argparse.Namespace) -> None:
    training_args = TrainingArguments(
        args.output_dir, deepspeed=args.deepspeed, per_device_train_batch_size=8, max_steps=12,
        learning_rate=3e-3, logging_steps=1, save_steps=6, report_to=[], disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(), ddp_backend=args.backend, max_grad_norm=1.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlavaModel()
    model.vision_tower.requires_grad_(False)
    model.language_model.requires_grad_(not args.tune_mm_mlp_adapter)
    trainer = LlavaTrainer(model=model, args=training_args, train_dataset=ImagesWithText(192))
    trainer.train()
    trainer.save_state()
    final = get_mm_adapter_state_maybe_zero_3(trainer.model.named_parameters(), ["mm_projector"])
    if any(not torch.isfinite(value).all() or value.numel() == 0 for value in final.values()):
        raise SystemExit("the adapter's weights were not gathered")
    if training_args.local_rank in (0, -1):
        torch.save(final, Path(args.output_dir, "mm_projector.bin"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    report(losses, words=len(make_tokenizer()), shapes={k: list(v.shape) for k, v in final.items()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--tune_mm_mlp_adapter", action="store_true")
    parser.add_argument("--backend", default=None)
    main(parser.parse_args())
