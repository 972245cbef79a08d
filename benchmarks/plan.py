"""Peak of activations: `rayzero plan`'s against the allocations of a real micro-step on a CPU.

    python -m benchmarks.plan

Needs transformers. The real peak is the running sum of the memory events of `torch.profiler`, over
forward and backward of a second micro-step; each gradient is freed when it has been accumulated.
Weights, gradients, optimizer state and buffers are compared to the byte by tests/engine/planning.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from rayzero.engine.config import parse_config
from rayzero.engine.planning.search import MemoryPlanner

VOCAB, LENGTH, SAMPLES = 512, 64, 4
DECODER = {"vocab_size": VOCAB, "hidden_size": 128, "num_attention_heads": 4}
WIDE = DECODER | {"intermediate_size": 512, "num_hidden_layers": 4}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 128, "n_layer": 4, "n_head": 4},
    ),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", WIDE | {"num_key_value_heads": 2}),
    "BERT": ("BertForMaskedLM", "BertConfig", WIDE),
    "ViT": (
        "ViTForImageClassification",
        "ViTConfig",
        {**WIDE, "image_size": 64, "patch_size": 8},
    ),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCAB, "d_model": 128, "d_ff": 512, "d_kv": 32, "num_layers": 4}
        | {"num_heads": 4, "decoder_start_token_id": 0},
    ),
    "Mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        WIDE | {"num_key_value_heads": 2, "num_local_experts": 4, "num_hidden_layers": 3},
    ),
}
CHECKPOINTING = {"none": None, "non-reentrant": False, "reentrant": True}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_model(family: str, checkpointing: str = "none") -> nn.Module:
    model_name, config_name, options = FAMILIES[family]
    options = options if family == "ViT" else options | {"use_cache": False}
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**options))
    reentrant = CHECKPOINTING[checkpointing]
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    trained: nn.Module = model.train()
    return trained


def make_batch(family: str, samples: int) -> dict[str, Tensor]:
    if family == "ViT":
        labels = torch.zeros(samples, dtype=torch.long)
        return {"pixel_values": torch.randn(samples, 3, 64, 64), "labels": labels}
    tokens = torch.randint(0, VOCAB, (samples, LENGTH))
    return {"input_ids": tokens, "labels": tokens}


def planned_peak(family: str, checkpointing: str, dtype: str) -> int:
    document: dict[str, Any] = {"train_micro_batch_size_per_gpu": SAMPLES}
    document["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
    document["bf16"] = {"enabled": dtype == "bf16"}
    make = partial(make_model, family, checkpointing)
    planner = MemoryPlanner(make, partial(make_batch, family))
    return planner.estimate(parse_config(document), 1).bytes["activations"]


def measured_peak(family: str, checkpointing: str, dtype: str, backend: str | None = None) -> int:
    """With `backend`, the model is compiled by torch.compile."""
    model = make_model(family, checkpointing).to(DTYPES[dtype])
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_free_grad)
    batch = make_batch(family, SAMPLES)
    batch = {
        name: it.to(DTYPES[dtype]) if it.is_floating_point() else it for name, it in batch.items()
    }
    run: Any = model if backend is None else torch.compile(model, backend=backend)
    run(**batch).loss.backward()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(**batch).loss.backward()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    allocations = [it for it in events if it.name() == "[memory]"]
    live = peak = 0
    for event in sorted(allocations, key=lambda it: it.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def _free_grad(param: Tensor) -> None:
    param.grad = None


def rows(families: list[str], backend: str | None) -> Iterator[tuple[str, str, str, int, int]]:
    for family, dtype, checkpointing in product(families, DTYPES, CHECKPOINTING):
        plan = planned_peak(family, checkpointing, dtype)
        yield (
            family,
            dtype,
            checkpointing,
            plan,
            measured_peak(family, checkpointing, dtype, backend),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--compile", metavar="BACKEND", help="compile the real model")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| family | dtype | checkpointing | plan MiB | measured MiB | ratio |\n|" + "---|" * 6)
    for *names, plan, real in rows(arguments.families or list(FAMILIES), arguments.compile):
        sizes = f"{plan / 2**20:.2f} | {real / 2**20:.2f} | {plan / real:.3f}"
        print(f"| {' | '.join(names)} | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
