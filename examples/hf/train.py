"""Trains a LoRA adapter of a small Llama with transformers' Trainer. Nothing here is rayzero's.

torchrun --nproc-per-node 2 -m rayzero.deepspeed examples/hf/train.py runs/hf
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from examples.hf.data import VOCABULARY, Source

LENGTH = 64  # bytes of a sample


def make_model() -> torch.nn.Module:
    """A Llama with random weights, which stay frozen, and an adapter. Nothing is downloaded, so
    there is no pre-trained model: embeddings and head are trained whole, unlike in a usual
    fine-tuning."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    adapter = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules="all-linear",
        modules_to_save=["embed_tokens", "lm_head"],
        task_type="CAUSAL_LM",
    )
    model: torch.nn.Module = get_peft_model(LlamaForCausalLM(config), adapter)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA on a small Llama, by transformers' Trainer")
    parser.add_argument("folder", help="for checkpoints and the adapter")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    set_seed(0)
    trainer = Trainer(
        model=make_model(),
        args=TrainingArguments(
            options.folder,
            deepspeed=str(Path(__file__).with_name("ds_config.json")),
            per_device_train_batch_size=16,
            max_steps=options.steps,
            learning_rate=5e-3,
            lr_scheduler_type="cosine",
            warmup_steps=20,
            logging_steps=20,
            save_steps=100,
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Source(LENGTH),
        eval_dataset=Source(LENGTH, held_out=True, limit=512),
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()  # the adapter alone
    if trainer.is_world_process_zero():
        print(f"held out: {loss / math.log(2):.2f} bits per byte", flush=True)


if __name__ == "__main__":
    main()
