"""A model of transformers at stage 3 that has no engine yet is saved by rank 0; with one, refused.

torchrun --nproc-per-node 2 -m rayzero.deepspeed tests/huggingface/unbuilt.py FOLDER
"""

from __future__ import annotations

import sys

import deepspeed  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from rayzero.engine.errors import ConfigError, EngineError

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}


def equal(folder: str, state: dict[str, torch.Tensor]) -> bool:
    loaded = LlamaForCausalLM.from_pretrained(folder).state_dict()
    return list(loaded) == list(state) and all(torch.equal(loaded[it], state[it]) for it in state)


def save(model: LlamaForCausalLM, folder: str) -> str:
    """What was raised."""
    try:
        model.save_pretrained(folder)
    except (ConfigError, EngineError) as error:
        return str(error)
    return ""


def main(folder: str) -> None:
    shape = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    for tied in (True, False):
        config = LlamaConfig(**shape, **heads, tie_word_embeddings=tied)
        torch.manual_seed(3)
        expected = LlamaForCausalLM(config).state_dict()
        folders = [f"{folder}/{tied}-{name}" for name in ("built", "loaded", "engine")]
        arguments = TrainingArguments(folder, deepspeed=CONFIG, use_cpu=True)
        torch.manual_seed(3)
        with deepspeed.zero.Init():
            model = LlamaForCausalLM(config)
        raised = save(model, folders[0])
        assert ("rank 1 used a weight" in raised) == bool(dist.get_rank()), raised
        dist.barrier()
        model = LlamaForCausalLM.from_pretrained(folders[0])
        raised = save(model, folders[1])
        assert ("rank 1 used a weight" in raised) == bool(dist.get_rank()), raised
        engine = deepspeed.initialize(model=model, config=CONFIG)[0]
        assert "each rank holds a part" in save(engine.module, folders[2])
        del arguments
        dist.barrier()
        assert all(equal(it, expected) for it in folders[:2])
        engine.close()
    sys.stdout.write(f"saved {dist.get_rank()}\n")  # one write: the ranks share the pipe


if __name__ == "__main__":
    main(sys.argv[1])
