"""In the shape of accelerate's `complete_nlp_example.py` and its DeepSpeed examples: a plugin,
DummyOptim and DummyScheduler, `accumulate`, clipping, `save_state` every few steps, `load_state`,
`skip_first_batches`, the unwrapped model saved as safetensors."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler, InitProcessGroupKwargs, set_seed
from corpus import gpt2_config, make_tokenizer, report, sentences
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2LMHeadModel


def batches() -> TensorDataset:
    ids = make_tokenizer()(" ".join(sentences(200)))["input_ids"]
    return TensorDataset(torch.tensor(ids[: 48 * 16]).view(48, 16))


def main(args: argparse.Namespace) -> None:
    on_cpu = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
    plugin = None
    if args.config is not None:
        plugin = DeepSpeedPlugin(hf_ds_config=args.config)
    elif args.stage is not None:
        plugin = DeepSpeedPlugin(
            zero_stage=args.stage, gradient_accumulation_steps=2, gradient_clipping=1.0
        )
    accelerator = Accelerator(
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=2,
        project_dir=args.output_dir,
        kwargs_handlers=on_cpu,
    )
    set_seed(42)
    model = GPT2LMHeadModel(gpt2_config())
    ds_config = accelerator.state.deepspeed_plugin.deepspeed_config
    if "optimizer" in ds_config:
        optimizer = DummyOptim(model.parameters(), lr=3e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if "scheduler" in ds_config:
        lr_scheduler = DummyScheduler(optimizer, total_num_steps=24, warmup_num_steps=2)
    else:
        lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    train_dataloader = DataLoader(batches(), batch_size=4, shuffle=True)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    overall_step, starting_epoch, resume_step = 0, 0, None
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        resume_step = int(Path(args.resume_from_checkpoint).stem.replace("step_", ""))
        starting_epoch, resume_step = divmod(resume_step, len(train_dataloader))
        overall_step = starting_epoch * len(train_dataloader)

    losses, norms = [], []
    for epoch in range(starting_epoch, 2):
        model.train()
        active = train_dataloader
        if resume_step is not None and epoch == starting_epoch:
            active = accelerator.skip_first_batches(train_dataloader, resume_step)
            overall_step += resume_step
        for (ids,) in active:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    norms.append(float(norm) if norm is not None else None)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()[None]).mean().item())
            overall_step += 1
            if overall_step % args.checkpointing_steps == 0:
                accelerator.save_state(str(Path(args.output_dir, f"step_{overall_step}")))
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        Path(args.output_dir, "final"),
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    report(losses, norms=norms, lr=lr_scheduler.get_last_lr(), processes=accelerator.num_processes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="a DeepSpeed config file")
    parser.add_argument("--stage", type=int)
    parser.add_argument("--checkpointing_steps", type=int, default=6)
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--output_dir", required=True)
    main(parser.parse_args())
