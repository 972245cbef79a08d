"""`deepspeed.zero.TiledLinear`: a linear layer of several tiles, which run one after the other.

At stage 3 each tile can be a block of its own (`rayzero.unshard_modules: ["Linear"]`), so that one
tile is gathered at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from rayzero.engine.api.params import GatheredParameters
from rayzero.engine.errors import ConfigError


class TiledLinear(nn.Module):
    """`nn.Linear` as a grid of smaller layers, `linears[row][column]`. Rows are parts of the
    output, columns are parts of the input. The layers of the last column have the bias.

    Args:
        in_splits: number of columns.
        out_splits: number of rows.
        input_is_already_split: `forward` is given the parts of the input.
        combine_out_splits: False: `forward` returns the parts of the output.
        linear_cls: makes a tile; is passed `options`, too.
        init_linear: a layer whose values are copied.

    Raises:
        ConfigError: more splits than features, or fewer than one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = _bounds("in", in_features, in_splits)
        self.out_parts = _bounds("out", out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(right - left, low - top, bias=bias and right == in_features, **options)
                for left, right in pairwise(self.in_parts)
            )
            for top, low in pairwise(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        split = self.input_is_already_split
        parts = input_ if split else input_.tensor_split(self.in_parts[1:-1], dim=-1)
        if len(parts) != self.in_splits:
            raise ConfigError(
                f"TiledLinear got an input of {len(parts)} parts",
                allowed=f"in_splits={self.in_splits}",
            )
        outputs = [
            self._sum([tile(part) for tile, part in zip(row, parts, strict=True)])
            for row in self._rows
        ]
        return self._join(outputs) if self.combine_out_splits else outputs

    @property
    def _rows(self) -> list[list[Any]]:
        return [list(cast(nn.ModuleList, row)) for row in self.linears]

    def _sum(self, terms: list[Any]) -> Any:
        return reduce(torch.add, terms)

    def _join(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copies the values of a layer; at stage 3 those of rank 0, collectively. Raises
        ConfigError if the layer has another shape, or only one of the two layers has a bias."""
        shape, expected = tuple(other.weight.shape), (self.out_features, self.in_features)
        if shape != expected or (other.bias is not None) != self.use_bias:
            raise ConfigError(
                f"TiledLinear.copy_params_from() got a layer with a weight of {shape}, "
                f"bias={other.bias is not None}",
                allowed=f"a weight of {expected}, bias={self.use_bias}",
            )
        rows = other.weight.tensor_split(self.out_parts[1:-1])
        for tiles, part, (top, low) in zip(self._rows, rows, pairwise(self.out_parts), strict=True):
            columns = part.tensor_split(self.in_parts[1:-1], dim=1)
            for tile, weight in zip(tiles, columns, strict=True):
                _copy(tile.weight, weight)
            if self.use_bias:
                _copy(tiles[-1].bias, other.bias[top:low])


class TiledLinearReturnBias(TiledLinear):
    """`TiledLinear` of layers that return (output, bias), as Megatron's do. It returns the same."""

    def _sum(self, terms: list[Any]) -> Any:
        biases = [bias for _, bias in terms if bias is not None]
        return super()._sum([output for output, _ in terms]), biases[-1] if biases else None

    def _join(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        joined = super()._join([output for output, _ in outputs])
        return joined, super()._join(biases) if biases else None


def _bounds(name: str, features: int, splits: int) -> list[int]:
    if not 1 <= splits <= features:
        raise ConfigError(
            f"TiledLinear({name}_features={features}, {name}_splits={splits}) was given",
            allowed=f"{name}_splits from 1 to {features}",
        )
    size, larger = divmod(features, splits)  # the larger parts first, as in `tensor_split`
    return [part * size + min(part, larger) for part in range(splits + 1)]


def _copy(param: Any, value: Tensor) -> None:
    with GatheredParameters(param, modifier_rank=0):
        param.copy_(value)
