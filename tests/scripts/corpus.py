"""What the scripts train on: Python's documentation, cut into words, and small models to match.

Nothing is downloaded. The tokenizer knows the 200 most frequent words.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = 200
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
CHAT = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} </s> {% endfor %}"
)


def sentences(count: int, words: int = 12) -> list[str]:
    """The first sentences of Python's documentation, each of about `words` words."""
    text = " ".join(topics[name] for name in sorted(topics)[:40]).split()
    return [" ".join(text[start : start + words]) for start in range(0, count * words, words)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    common = Counter(" ".join(sentences(300)).split()).most_common(WORDS - len(SPECIAL))
    vocabulary = {word: i for i, word in enumerate((*SPECIAL, *(word for word, _ in common)))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT, **names)


def gpt2_config() -> GPT2Config:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": WORDS, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2Config(**sizes, **dropout, bos_token_id=2, eos_token_id=3, pad_token_id=0)


def llama_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
    )


def pretrained(folder: str | Path, config: Any = None) -> str:
    """The path of a random model and its tokenizer, written by each node's first process; the
    others wait for it."""
    path = Path(folder, "pretrained")
    if int(os.environ.get("LOCAL_RANK", "0")) == 0 and not path.exists():
        torch.manual_seed(0)
        new = path.with_name("pretrained.new")
        made = GPT2LMHeadModel(gpt2_config()) if config is None else LlamaForCausalLM(config)
        made.save_pretrained(new)
        make_tokenizer().save_pretrained(new)
        new.rename(path)
    while not path.exists():
        time.sleep(0.05)
    return str(path)


def report(losses: list[float], **more: Any) -> None:
    """Prints the result on rank 0."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps({"losses": losses, **more}))
        sys.stdout.flush()
