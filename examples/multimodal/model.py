"""Two towers in the manner of CLIP (Radford et al. 2021), in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from examples.multimodal.data import LENGTH, WORDS
from examples.vision.data import SIZE
from examples.vision.model import ResNet


class TextTower(nn.Module):
    """A transformer over words: tokens (batch, LENGTH) to (batch, outputs)."""

    def __init__(self, width: int, layers: int, outputs: int) -> None:
        super().__init__()
        self.word = nn.Embedding(1 + len(WORDS), width)
        self.position = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(LENGTH * width, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.word(tokens) + self.position(torch.arange(LENGTH, device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        output: Tensor = self.head(hidden.flatten(1))
        return output


class TwoTowers(nn.Module):
    """Embeds images and captions as unit vectors, both of size `outputs`."""

    def __init__(self, width: int, layers: int, outputs: int) -> None:
        super().__init__()
        self.image = ResNet(2 * SIZE * SIZE, width, outputs)
        self.text = TextTower(2 * width, layers, outputs)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings of the images and of the captions, and the factor of their products."""
        return (
            normalize(self.image(images), dim=1),
            normalize(self.text(tokens), dim=1),
            self.log_scale.exp(),
        )
