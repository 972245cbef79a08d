"""QLoRA as a user writes it: `from_pretrained(quantization_config=...)`, PEFT, and Trainer.

`quantized.py FOLDER KIND...` under torchrun; rank 0 writes {kind: results by stage} to
FOLDER/results.json.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    TorchAoConfig,
    Trainer,
    TrainingArguments,
)

WIDTH, VOCABULARY, LENGTH, STEPS, LR = 64, 97, 16, 4, 0.1


def quantization(kind: str) -> BitsAndBytesConfig | TorchAoConfig:
    if kind == "torchao-8bit":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    if kind == "bitsandbytes-8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    storage = torch.bfloat16 if kind.endswith("bf16-storage") else torch.uint8
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=storage,
    )


def make_model(folder: str, kind: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization(kind), dtype=torch.float32
    )
    if kind.startswith("bitsandbytes"):
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=True)
    torch.manual_seed(3)
    names = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(
        model, LoraConfig(r=4, target_modules=names, lora_dropout=0.0, init_lora_weights=False)
    )


def samples() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def adapters(model: Any) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    return {name: it.clone() for name, it in get_peft_model_state_dict(model).items()}


def plain(folder: str, kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make_model(folder, kind).train()
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer, losses = torch.optim.SGD(params, LR), []
    batch = {key: torch.stack([it[key] for it in samples()]) for key in samples()[0]}
    for _ in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, adapters(model)


def trainer(folder: str, kind: str, stage: int, steps: int) -> Trainer:
    arguments = TrainingArguments(
        f"{folder}/{kind}-{stage}",
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "SGD", "params": {"lr": "auto"}},
        },
        per_device_train_batch_size=2,
        max_steps=steps,
        max_grad_norm=0.0,
        learning_rate=LR,
        lr_scheduler_type="constant",
        save_steps=2,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    model = make_model(folder, kind)  # at stage 3 inside transformers' HfDeepSpeedConfig
    return Trainer(model=model, args=arguments, train_dataset=samples())


def check(folder: str, kind: str, stage: int) -> dict[str, Any]:
    losses, weights = plain(folder, kind)
    first = trainer(folder, kind, stage, 2)
    first.train()
    seen = [row["loss"] for row in first.state.log_history if "loss" in row]
    second = trainer(folder, kind, stage, STEPS)
    second.train(resume_from_checkpoint=True)
    seen += [row["loss"] for row in second.state.log_history if "loss" in row][len(seen) :]
    engine: Any = second.model_wrapped
    state = engine.module_state_dict()
    names = {name for name in state if "lora" in name}
    ours = {name.replace(".default", ""): state[name] for name in names}
    errors = [float((ours[name] - weights[name]).abs().max()) for name in weights] if ours else []
    return {
        "losses": max(abs(a - b) for a, b in zip(seen, losses, strict=True)),
        "adapters": max(errors, default=0.0),
        "bytes_outside_units": sum(it.nbytes for it in engine._runtime.ungrouped_params.values()),
    }


def main(folder: str, kinds: list[str]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    results: dict[str, list[dict[str, Any]]] = {}
    for kind in kinds:
        for stage in range(4):
            results.setdefault(kind, []).append(check(folder, kind, stage))
            gc.collect()
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    logging.getLogger("torchao").setLevel(logging.ERROR)
    try:
        main(sys.argv[1], sys.argv[2:])
    except BaseException:
        traceback.print_exc()
        raise
