"""ZeRO-3 generation: `from_pretrained` under `HfDeepSpeedConfig`, `initialize`, `generate`."""

from __future__ import annotations

import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from corpus import pretrained, report
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import HfDeepSpeedConfig

parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True)
parser.add_argument("--local_rank", type=int, default=int(os.getenv("LOCAL_RANK", "0")))
parser.add_argument("--dtype", default="float32")
args = parser.parse_args()

os.environ["TOKENIZERS_PARALLELISM"] = "false"
world_size = int(os.getenv("WORLD_SIZE", "1"))
deepspeed.init_distributed()
model_name = pretrained(args.folder)
config = AutoConfig.from_pretrained(model_name)
model_hidden_size = config.hidden_size
ds_config = {
    "fp16": {"enabled": args.dtype == "float16"},
    "bf16": {"enabled": args.dtype == "bfloat16"},
    "zero_optimization": {
        "stage": 3,
        "stage3_prefetch_bucket_size": 0.9 * model_hidden_size * model_hidden_size,
        "stage3_param_persistence_threshold": 0,
    },
    "steps_per_print": 2000,
    "train_batch_size": world_size,
    "train_micro_batch_size_per_gpu": 1,
    "wall_clock_breakdown": False,
}
dschf = HfDeepSpeedConfig(ds_config)  # kept alive: from_pretrained looks at it
model = AutoModelForCausalLM.from_pretrained(model_name, dtype=getattr(torch, args.dtype))
ds_engine = deepspeed.initialize(model=model, config_params=ds_config)[0]
ds_engine.module.eval()
model = ds_engine.module

tokenizer = AutoTokenizer.from_pretrained(model_name)
inputs = tokenizer(["The for statement", "is used to"][dist.get_rank() % 2], return_tensors="pt")
device = torch.device(get_accelerator().device_name(args.local_rank))
with torch.no_grad():
    outputs = model.generate(
        inputs["input_ids"].to(device), max_new_tokens=6, do_sample=False,
        synced_gpus=world_size > 1,
    )  # fmt: skip
text = tokenizer.decode(outputs[0], skip_special_tokens=True)
del dschf
report([], text=text, tokens=outputs[0].tolist())
