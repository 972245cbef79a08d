"""Memory of a step: `rayzero plan`'s against the allocations of a real one on a CPU.

    python -m benchmarks.plan
    python -m benchmarks.plan --compiled GPT-2 Llama
    python -m benchmarks.plan --totals

Needs transformers. The real peak is the running sum of the memory events of `torch.profiler`: for
activations over forward and backward of a second micro-step, each gradient freed when it has been
accumulated; for totals over the fourth step of an engine on 2 ranks, on top of what it holds.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import rayzero
from rayzero.engine.config import parse_config
from rayzero.engine.planning.search import MemoryEstimate, MemoryPlanner
from tests.engine.offload.training import separate_host_memory
from tests.support.ranks import run_ranks

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


def make_config(stage: int, dtype: str, *, compiled: bool = False) -> dict[str, Any]:
    """With buckets of one size: else those of a GPU are planned, and are longer than a CPU's."""
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 200_000},
        "compile": {"enabled": compiled},
    }


def plan(
    family: str, checkpointing: str, document: dict[str, Any], world_size: int
) -> MemoryEstimate:
    make = partial(make_model, family, checkpointing)
    planner = MemoryPlanner(make, partial(make_batch, family))
    return planner.estimate(parse_config(document), world_size)


def planned_peak(family: str, checkpointing: str, dtype: str, *, compiled: bool = False) -> int:
    """Of activations."""
    document = make_config(0, dtype, compiled=compiled)
    return plan(family, checkpointing, document, 1).bytes["activations"]


def measured_peak(family: str, checkpointing: str, dtype: str, *, compiled: bool = False) -> int:
    """Of activations; a compiled model runs as graphs, without kernels that fuse operations."""
    model = make_model(family, checkpointing).to(DTYPES[dtype])
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_free_grad)
    batch = make_batch(family, SAMPLES)
    batch = {
        name: it.to(DTYPES[dtype]) if it.is_floating_point() else it for name, it in batch.items()
    }
    if compiled:
        torch.compiler.reset()
        model.compile(backend="aot_eager_decomp_partition")
    model(**batch).loss.backward()
    gc.collect()
    with allocations() as peaks:
        model(**batch).loss.backward()
    return peaks[0]


def measured_total(rank: int, world: int, family: str, checkpointing: str, document: Any) -> int:
    """Of a rank's fourth step; host memory counts as separate."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with separate_host_memory():
        model = make_model(family, checkpointing)
        engine, *_ = rayzero.initialize(model=model, config=document)

        def take_step() -> None:
            loss = engine(**make_batch(family, SAMPLES)).loss
            engine.backward(loss)
            del loss
            engine.step()

        for _ in range(3):
            take_step()
        gc.collect()
        held = sum(
            size
            for name, size in engine.metrics.bytes.items()
            if not name.startswith(("host_", "disk_"))
        )
        with allocations() as peaks:
            take_step()
    return held + peaks[0]


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Yields a list, in which there is the peak of bytes allocated in the block at its end."""
    peaks: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peaks
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    memory = sorted((it for it in events if it.name() == "[memory]"), key=lambda it: it.start_ns())
    peaks.append(max(accumulate((it.nbytes() for it in memory), initial=0)))


def _free_grad(param: Tensor) -> None:
    param.grad = None


def activation_rows(families: list[str], *, compiled: bool) -> Iterator[list[Any]]:
    for family, dtype, checkpointing in product(families, DTYPES, CHECKPOINTING):
        planned = planned_peak(family, checkpointing, dtype, compiled=compiled)
        measured = measured_peak(family, checkpointing, dtype, compiled=compiled)
        yield [family, dtype, checkpointing, planned, measured]


def total_rows(families: list[str]) -> Iterator[list[Any]]:
    cases = product(families, DTYPES, ("none", "non-reentrant"), range(4))
    for family, dtype, checkpointing, stage in cases:
        document = make_config(stage, dtype)
        planned = plan(family, checkpointing, document, 2).device_total_bytes
        measured = max(run_ranks(2, measured_total, family, checkpointing, document))
        yield [family, dtype, f"{checkpointing}, stage {stage}", planned, measured]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--compiled", action="store_true", help="by torch.compile")
    parser.add_argument("--totals", action="store_true", help="of steps on 2 ranks, each stage")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    families = arguments.families or list(FAMILIES)
    compiled = arguments.compiled
    rows = (
        total_rows(families) if arguments.totals else activation_rows(families, compiled=compiled)
    )
    print("| family | dtype | checkpointing | plan MiB | measured MiB | ratio |\n|" + "---|" * 6)
    for *names, planned, real in rows:
        sizes = f"{planned / 2**20:.2f} | {real / 2**20:.2f} | {planned / real:.3f}"
        print(f"| {' | '.join(names)} | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
