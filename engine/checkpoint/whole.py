"""Whole tensors out of a state source, one at a time."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from rayzero.engine.layout.reshard import Copy, plan_copies
from rayzero.engine.state.parts import DTYPES
from rayzero.engine.state.source import StateSource
from rayzero.engine.state.table import LogicalTensor, Range


class WholeTensors:
    """Puts logical tensors together from the ranges that a source holds.

    Attributes:
        tensors: what there is, by name.
    """

    def __init__(self, source: StateSource) -> None:
        """
        Raises:
            MissingRangesError: the source is incomplete.
        """
        self._source = source
        self._tables = source.tables
        self.tensors: dict[str, LogicalTensor] = {}
        for table in self._tables:
            self.tensors |= table.tensors
        wanted = [Range(name, 0, one.numel, 0) for name, one in self.tensors.items()]
        self._copies: defaultdict[str, list[Copy]] = defaultdict(list)
        for copy in plan_copies(wanted, [table.ranges for table in self._tables]):
            self._copies[copy.wanted.name].append(copy)

    def of_kind(self, kind: str) -> dict[str, str]:
        """Plain names -> logical names of a kind: `weights`, `buffers`, `optimizer.<key>`."""
        start = f"{kind}/"
        return {name.removeprefix(start): name for name in self.tensors if name.startswith(start)}

    def read(self, name: str) -> Tensor:
        """The whole tensor, in new memory, in the dtype that the state has.

        Raises:
            DataError: its bytes are damaged or gone.
        """
        one = self.tensors[name]
        flat = torch.empty(one.numel, dtype=DTYPES[one.dtype])
        raw = flat.view(torch.uint8).numpy().data
        for copy in self._copies[name]:
            table = self._tables[copy.source]
            size = table.tensors[name].item_bytes
            at = copy.held.offset + (copy.start - copy.held.start) * size
            self._source.read(copy.source, at, raw[copy.start * size : copy.stop * size])
        return flat.view(one.shape)
