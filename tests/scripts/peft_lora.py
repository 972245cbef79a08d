"""In the shape of PEFT's ZeRO-3 example: LoRA over accelerate, `generate`, the adapter saved."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs
from corpus import llama_config, make_tokenizer, pretrained, report, sentences
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup, set_seed


def main(args: argparse.Namespace) -> None:
    on_cpu = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
    plugin = DeepSpeedPlugin(zero_stage=args.stage, zero3_save_16bit_model=True)
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=on_cpu)
    set_seed(42)
    name = pretrained(args.output_dir, llama_config())
    accelerator.wait_for_everyone()
    model = AutoModelForCausalLM.from_pretrained(name)
    peft_config = LoraConfig(
        task_type=TaskType.CAUSAL_LM, inference_mode=False, r=4, lora_alpha=16, lora_dropout=0.0,
        target_modules=["q_proj", "v_proj"],
    )  # fmt: skip
    model = get_peft_model(model, peft_config)
    if accelerator.is_main_process:
        model.print_trainable_parameters()
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"

    def collate_fn(texts: list[str]) -> dict:
        batch = tokenizer(texts, padding="longest", return_tensors="pt")
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return batch

    loader = DataLoader(sentences(48), batch_size=4, shuffle=True, collate_fn=collate_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, len(loader) * 2)
    model, loader, optimizer, schedule = accelerator.prepare(model, loader, optimizer, schedule)
    is_ds_zero_3 = accelerator.state.deepspeed_plugin.zero_stage == 3
    losses = []
    for _epoch in range(2):
        model.train()
        for batch in loader:
            loss = model(**batch).loss
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    batch = {key: value for key, value in batch.items() if key != "labels"}
    with torch.no_grad():
        outputs = accelerator.unwrap_model(model).generate(
            **batch, synced_gpus=is_ds_zero_3, max_new_tokens=4
        )
    texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        f"{args.output_dir}/adapter", state_dict=state, is_main_process=accelerator.is_main_process
    )
    report(losses, text=texts[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--output_dir", required=True)
    main(parser.parse_args())
