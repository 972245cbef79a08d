"""What a training function does around its steps, beside forward, backward and step.

plain        nothing
own backward the script's own backward of a scaled loss, and a second one for a part of it
access       reads gradients, and reads and writes weights and optimizer state, where it may
empty batch  a micro-step's loss does not use the model: this rank had no samples
load         loads a state between two steps, also from registered memory
mirror       the state is mirrored beside training, and written between two steps
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.api import tensor_fragments as api
from rayzero.engine.api.params import GatheredParameters
from rayzero.engine.device import get_device
from rayzero.engine.layout.state_index import BlockIndex, LogicalTensor, StateSource, TensorRange
from rayzero.engine.precision.dtypes import DTYPE_BY_NAME, dtype_name
from rayzero.engine.recut import KeptSource
from rayzero.engine.state.load import LOAD_ALL, _model_tensors
from tests.support.races.mirroring import mirroring_session
from tests.support.virtual_device.placement import DEVICE

_ALIGN_BYTES = 128


class Plain:
    """Forward, backward, step. `steps`: how many; buffers are assigned after the first, weights
    are prefetched in the second."""

    steps = 3

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the life of the engine."""
        yield

    @property
    def log(self) -> tuple[str, ...]:
        """What others were told."""
        return ()

    def loss(self, engine: Any, batch: Tensor, number: int) -> Tensor:
        """Of a micro-batch, with its number since the start."""
        loss: Tensor = engine(batch)
        return loss

    def backward(self, engine: Any, loss: Tensor) -> None:
        engine.backward(loss)

    def before_step(self, engine: Any, number: int) -> None:
        """After the last backward of step `number`, from 0."""

    def after_step(self, engine: Any, number: int) -> None:
        """After step `number`, from 0."""


class OwnBackward(Plain):
    """Two backwards a micro-step, neither by the engine."""

    def backward(self, engine: Any, loss: Tensor) -> None:
        engine.scale(loss).backward(retain_graph=True)
        engine.scale(loss * 0.5).backward()


class Access(Plain):
    """A penalty of weights after forward; gradients before the step; weights after it, and nothing
    after the third, so that gathers are in flight in the next forward."""

    steps = 4

    def loss(self, engine: Any, batch: Tensor, number: int) -> Tensor:
        loss: Tensor = engine(batch)
        if engine.settings.config.zero_optimization.stage == 3:  # resharded after forward
            return loss
        trained = (param for param in engine.module.parameters() if param.requires_grad)
        return loss + sum(param.float().square().mean() for param in trained) * 1e-3

    def before_step(self, engine: Any, number: int) -> None:
        param = next(engine.module.parameters())
        gradient = api.safe_get_full_grad(param)
        if gradient is not None:
            api.safe_set_full_grad(param, gradient * 0.5)

    def after_step(self, engine: Any, number: int) -> None:
        if number == 0:  # of all, since a gather in place does not write this rank's part
            with GatheredParameters(engine.module.parameters()):
                sum(param.detach().sum() for param in engine.module.parameters())
        elif number == 1:
            write_weights(engine)
            write_moments(engine)
        elif number == 3 and engine.settings.config.zero_optimization.stage < 3:
            sum(param.detach().sum() for param in engine.module.parameters())


@torch.no_grad()
def evaluate(engine: Any, batch: Tensor) -> None:
    """A forward without a backward. The result is not read, so the host does not wait."""
    engine.eval()
    engine(batch)
    engine.train()


def write_weights(engine: Any) -> None:
    """Changes parameters through the engine: the first from host memory, so that nothing waits."""
    first, last = (list(engine.module.parameters())[number] for number in (0, -1))
    if first.requires_grad:
        api.safe_set_full_fp32_param(first, torch.full(first.shape, 0.1))
    value = api.safe_get_full_fp32_param(last)
    if value is not None:
        api.safe_set_full_fp32_param(last, value * 1.01)


def write_moments(engine: Any) -> None:
    """Changes optimizer state through the engine, as `write_weights`; of optimizers with it."""
    if not all("betas" in group for group in engine.optimizer.param_groups):
        return
    first, last = (list(engine.module.parameters())[number] for number in (0, -1))
    if first.requires_grad:
        api.safe_set_full_optimizer_state(first, torch.full(first.shape, 0.1), "exp_avg")
    moment = api.safe_get_full_optimizer_state(last, "exp_avg")
    if moment is not None:
        api.safe_set_full_optimizer_state(last, moment * 0.5, "exp_avg")


class EmptyBatch(Plain):
    """The first micro-batch of the second step is empty."""

    steps = 4

    def __init__(self) -> None:
        self._skipping = False

    def loss(self, engine: Any, batch: Tensor, number: int) -> Tensor:
        if self._skipping:
            return torch.zeros((), device=DEVICE, requires_grad=True)
        return super().loss(engine, batch, number)

    def after_step(self, engine: Any, number: int) -> None:
        self._skipping = number == 1


class Load(Plain):
    """A state of zeros and ones is loaded after the second step, and after an evaluation; after the
    third from what the process holds, and registered memory."""

    steps = 4

    def loss(self, engine: Any, batch: Tensor, number: int) -> Tensor:
        self._batch = batch
        return super().loss(engine, batch, number)

    def after_step(self, engine: Any, number: int) -> None:
        if number not in (1, 2):
            return
        if engine.settings.config.zero_optimization.stage == 3:
            evaluate(engine, self._batch)
        source: Any = MadeUpState(engine, registered=number)
        if number == 2:
            source = KeptSource(engine.state.private_ranges(), source)
        engine.state.load_from(source, LOAD_ALL)
        source.close()
        engine.state.sync_model_weights()


class MadeUpState(StateSource):
    """A complete state of an engine's model with other values, in two blocks, each with every
    second tensor: the first `registered` ones in registered memory, the others to be read by the
    host."""

    step = 1

    def __init__(self, engine: Any, registered: int) -> None:
        runtime, optimizer = engine._runtime, engine._step.optimizer
        tensors = dict(_model_tensors(engine.module, runtime))
        for shard in optimizer.shards:
            trained = [it.name for it in shard.unit.layout.params if it.group == shard.group]
            for key, value in optimizer.state_tensors(shard).items():
                for name in trained:
                    shape = tensors[f"weights/{name}"].shape
                    item = LogicalTensor(dtype_name(value.dtype), shape)
                    tensors[f"optimizer.{key}/{name}"] = item
        names = sorted(tensors)
        self._device = get_device(DEVICE)
        self._document = json.loads(engine.state.metadata())
        halves = [{name: tensors[name] for name in names[start::2]} for start in (0, 1)]
        self.block_indexes = [_index(half) for half in halves]
        self._blocks = [_values(index) for index in self.block_indexes]
        self._registered = self._blocks[:registered]
        for block in self._registered:
            self._device.register_host(block)

    def metadata(self, rank: int) -> dict[str, Any]:
        return self._document

    def registered_block(self, block: int) -> memoryview | None:
        if block < len(self._registered):
            return memoryview(self._blocks[block].numpy().data)
        return None

    def verify(self, block: int) -> None:
        self._blocks[block].sum()

    def read(self, block: int, offset: int, into: memoryview) -> None:
        target = torch.frombuffer(into, dtype=torch.uint8)
        target.copy_(self._blocks[block][offset : offset + len(into)])

    def close(self) -> None:
        for block in self._registered:
            self._device.unregister_host(block)


def _index(tensors: Mapping[str, LogicalTensor]) -> BlockIndex:
    ranges, offset = [], 0
    for name, tensor in tensors.items():
        ranges.append(TensorRange(name, 0, tensor.numel, offset))
        offset += -(-tensor.numel * tensor.item_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return BlockIndex(dict(tensors), tuple(ranges), offset)


def _values(index: BlockIndex) -> Tensor:
    """Ones and zeros in turn, of each tensor's dtype."""
    block = torch.zeros(index.nbytes, dtype=torch.uint8)
    for held in index.ranges:
        dtype = DTYPE_BY_NAME[index.tensors[held.name].dtype]
        size = (held.stop - held.start) * index.tensors[held.name].item_bytes
        block[held.offset : held.offset + size].view(dtype)[::2] = 1
    return block


class Mirrored(Plain):
    """Each step is mirrored beside the next; the vault dies before the fourth, and the fifth is
    interrupted."""

    steps = 5

    @contextmanager
    def running(self) -> Iterator[None]:
        with mirroring_session() as self._session:
            yield

    @property
    def log(self) -> tuple[str, ...]:
        return (*self._session.posted, *self._session.vault.calls)

    def after_step(self, engine: Any, number: int) -> None:
        if number < 2:  # beside its mirror
            (write_moments, write_weights)[number](engine)
        self._session.prepare(number + 1)


_SCRIPTS: dict[str, type[Plain]] = {
    "plain": Plain,
    "own backward": OwnBackward,
    "access": Access,
    "empty batch": EmptyBatch,
    "load": Load,
    "mirror": Mirrored,
}


def make_script(name: str) -> Plain:
    return _SCRIPTS[name]()
