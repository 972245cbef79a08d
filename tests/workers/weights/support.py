"""A trainer's slots without an engine: a model's weights, cut over some ranks, and more state."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.layout.state_index import TensorRange
from rayzero.engine.state.ranges import StateBlock, StateRange, pack_block
from rayzero.workers.vault.records import SlotRef
from rayzero.workers.vault.slots import SlotChecksums, SlotWriter, checksum_of
from rayzero.workers.weights.directory import WeightDirectory
from rayzero.workers.weights.reader import WeightReader
from tests.workers.vault.support import VaultCluster

LIMIT_S = 60.0


class Net(nn.Module):
    """Weights of odd sizes, a buffer, and a tied weight."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(37, 5)
        self.body = nn.Sequential(nn.Linear(5, 33), nn.BatchNorm1d(33), nn.Linear(33, 5))
        self.head = nn.Linear(5, 37, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)
        for param in self.parameters():
            param.data.normal_()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[it], theirs[it]) for it in mine)


def cut(
    model: nn.Module, rank: int, world: int, prefix: str = "", frozen: Sequence[str] = ()
) -> list[StateRange]:
    """A rank's share of the state: optimizer state first, as if that were the order."""
    parts = []
    for kind in ("optimizer.m", "weights"):
        for name, param in model.named_parameters():
            is_frozen = name in frozen
            if is_frozen and kind != "weights":
                continue
            flat = param.detach().reshape(-1)
            start, stop = (flat.numel() * (rank + step) // world for step in (0, 1))
            full = f"{prefix}{kind}/{name}"
            ranges = (TensorRange(full, start, stop, 0),) if start < stop else ()
            memory = flat[start:stop] if kind == "weights" else torch.rand(stop - start)
            shapes = {full: tuple(param.shape)}
            parts.append(StateRange(memory, ranges, shapes, constant=is_frozen))
    if rank == 0:
        for name, buffer in model.named_buffers():
            full = f"{prefix}buffers/{name}"
            flat = buffer.reshape(-1)
            ranges = (TensorRange(full, 0, flat.numel(), 0),)
            parts.append(StateRange(flat, ranges, {full: tuple(buffer.shape)}, volatile=True))
    return [part for part in parts if part.ranges]


def ties_of(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    return {
        name: first[id(param)]
        for name, param in model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(param), name) != name
    }


@dataclass
class Trainer:
    """Mirrors its models to the vaults of its ranks' nodes, in two slots in turn.

    Args:
        nodes: of each rank.
        models: by engine; the first one's name is empty.
    """

    cluster: VaultCluster
    models: Mapping[str, nn.Module]
    nodes: Sequence[str] = ("a", "a")
    frozen: Sequence[str] = ()
    generation: int = 1
    hashed: bool = True
    first_name: str | None = None
    slots: list[list[SlotWriter]] = field(default_factory=list)

    def block(self, rank: int) -> StateBlock:
        parts = []
        for name, model in self.models.items():
            prefix = f"{name}:" if name else ""
            parts += cut(model, rank, len(self.nodes), prefix, self.frozen)
        return pack_block(parts)

    def mirror(self, step: int) -> WeightDirectory:
        """All ranks mirror the models as they are."""
        for rank in range(len(self.nodes)):
            self.write(rank, step)
        return self.directory(step)

    def directory(self, step: int) -> WeightDirectory:
        refs = [SlotRef(self.generation, rank, step, it) for rank, it in enumerate(self.nodes)]
        return WeightDirectory(tuple(refs))

    def write(self, rank: int, step: int) -> None:
        block, world = self.block(rank), len(self.nodes)
        if not self.slots:
            clients = [self.cluster.client(node, 100 + it) for it, node in enumerate(self.nodes)]
            self.slots = [[] for _ in clients]
            self._clients = clients
        held = self.slots[rank]
        if len(held) < 2:
            writer = self._clients[rank].reserve(self.generation, rank, world, block.index)
            held.append(writer)
        writer = min(held, key=lambda it: it.step)
        writer.begin()
        block.copy_to(writer.data)
        size, end = writer.constant_bytes, writer.weight_bytes
        writer.constants_checksum = checksum_of(writer.data[:size])
        checksums = SlotChecksums(
            checksum_of(writer.data[size:end]), checksum_of(writer.data[end:])
        )
        writer.commit(step, self.metadata(rank), False, checksums if self.hashed else None)

    def metadata(self, rank: int) -> bytes:
        documents: dict[str, Any] = {
            name: {"rank": rank, "step": 1} | ({"ties": ties_of(model)} if rank == 0 else {})
            for name, model in self.models.items()
        }
        document = documents.pop("")
        if documents:
            document |= {"engines": documents, "rng": {}}
        if self.first_name is not None:
            document["engine"] = self.first_name
        return json.dumps(document).encode()

    def change(self, seed: int) -> None:
        """Of all that is not frozen."""
        torch.manual_seed(seed)
        for model in self.models.values():
            for name, param in model.named_parameters():
                if name not in self.frozen:
                    param.data.normal_()
            for buffer in model.buffers():
                buffer.add_(1)


class Told:
    """What the controller has told."""

    def __init__(self, directory: WeightDirectory | None = None) -> None:
        self.directory = directory

    def __call__(self) -> WeightDirectory | None:
        return self.directory


def make_reader(
    cluster: VaultCluster,
    find: Callable[[], WeightDirectory | None],
    node: str = "a",
    check: Callable[[], None] = lambda: None,
    limit_s: float = LIMIT_S,
) -> WeightReader:
    client = cluster.client(node, worker=7)
    return WeightReader(find, lambda: client, check, limit_s)
