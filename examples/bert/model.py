"""A small transformers BertForSequenceClassification with random weights."""

from __future__ import annotations

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from examples.bert.data import KINDS, LENGTH, VOCAB


def make_model(seed: int = 0) -> nn.Module:
    """Create a model with weights determined by the seed."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=len(KINDS),
    )
    model: nn.Module = BertForSequenceClassification(config)
    return model
