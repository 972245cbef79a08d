"""Training states in memory, and a session that resumes from them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rayzero.engine.engine import Engine
from rayzero.engine.layout.state_index import BlockIndex, StateSource
from rayzero.engine.session import HostSession, StepRequests


@dataclass
class Block:
    """One rank's part of a state."""

    index: BlockIndex
    data: bytearray
    metadata: bytes

    @classmethod
    def of(cls, engine: Engine) -> Block:
        block = engine.state.pack()
        data = bytearray(block.index.nbytes)
        block.copy_to(memoryview(data))
        return cls(block.index, data, engine.state.metadata())


class BlocksSource(StateSource):
    """Blocks in memory: a source that counts the bytes read."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self.block_indexes = [block.index for block in blocks]
        self.step = json.loads(blocks[0].metadata)["step"]
        self.bytes_read = 0

    def metadata(self, rank: int) -> dict[str, Any]:
        metadata: dict[str, Any] = json.loads(self._blocks[rank % len(self._blocks)].metadata)
        return metadata

    def read(self, block: int, offset: int, into: memoryview) -> None:
        into[:] = memoryview(self._blocks[block].data)[offset : offset + len(into)]
        self.bytes_read += len(into)


@dataclass
class StateSession(HostSession):
    """A host session that resumes from blocks and records agreed step requests."""

    blocks: Sequence[Block] | None = None
    engine_config: dict[str, Any] | None = None
    seed: int = 0
    shares: Sequence[float] = ()
    requests: StepRequests = field(default_factory=StepRequests)
    agreed: list[StepRequests] = field(default_factory=list)
    source: BlocksSource | None = None

    @contextmanager
    def resume_from(self) -> Iterator[BlocksSource | None]:
        self.source = BlocksSource(self.blocks) if self.blocks else None
        yield self.source

    def step_requests(self) -> StepRequests:
        return self.requests

    def on_step_end(self, metrics: dict[str, float], agreed: StepRequests) -> None:
        self.agreed.append(agreed)
