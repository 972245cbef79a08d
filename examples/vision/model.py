"""A small residual network (He et al. 2016) in plain torch, independent of rayzero.

It normalizes by GroupNorm (Wu and He 2018), whose result does not depend on the other samples of a
micro-batch: so the training is the same with any number of workers. BatchNorm's is not.
"""

from __future__ import annotations

from torch import Tensor, nn

GROUPS = 8  # of channels that are normalized together


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """A 3x3 convolution and its normalization."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(GROUPS, outputs),
    )


class Block(nn.Module):
    """Two convolutions beside a shortcut. A `stride` of 2 halves height and width."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = conv(inputs, outputs, stride)
        self.second = conv(outputs, outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride=stride)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.second(self.first(images).relu())
        output: Tensor = (hidden + self.shortcut(images)).relu()
        return output


class ResNet(nn.Module):
    """Images (batch, 1, height, width) to (batch, outputs).

    Args:
        pixels: of an image: height * width.
        width: channels of the first convolutions.
    """

    def __init__(self, pixels: int, width: int, outputs: int) -> None:
        super().__init__()
        self.stem = conv(1, width)
        self.blocks = nn.Sequential(
            Block(width, width), Block(width, 2 * width, stride=2), Block(2 * width, 2 * width)
        )
        self.head = nn.Linear(2 * width * pixels // 4, outputs)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.blocks(self.stem(images).relu())
        output: Tensor = self.head(hidden.flatten(1))
        return output
