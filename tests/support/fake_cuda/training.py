"""Trains cases on the bookkeeping `cuda:0`, and finds what torch or NCCL would refuse."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.library import Library

import rayzero
from rayzero.engine import builder
from rayzero.engine.comm import nccl as nccl_module
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.comm.nccl import NcclBackend
from rayzero.engine.device import CudaDevice, replace_device
from rayzero.engine.offload import nvme_store
from rayzero.engine.offload.nvme_store import MappedFile
from tests.support.fake_cuda.census import Census
from tests.support.races.cases import Case
from tests.support.races.models import MODELS, make_batch
from tests.support.virtual_device.memory import current_place, describe

DEVICE = torch.device("cuda", 0)
STEPS = 3
_NO_NCCL_TYPE = {torch.int16, torch.complex64, torch.complex128}


@dataclass
class Findings:
    """What a case did.

    Attributes:
        syncs_per_step: what the host waits for in a step, by kind and place.
        refused: collectives that NCCL would refuse.
        hook_threads: in which the engine launched collectives.
    """

    case: dict[str, Any]
    error: str | None = None
    syncs_per_step: dict[str, float] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    hook_threads: list[str] = field(default_factory=list)
    resting_bytes: int = 0
    peak_bytes: int = 0


class _Queue:
    """A stream, an event or work: nothing runs, so nothing is waited for."""

    def __init__(self, census: Census) -> None:
        self._census = census

    def wait(self, *_: Any) -> bool:
        return True

    wait_stream = wait_event = wait

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._census.wait("synchronize")


class FakeCuda(CudaDevice):
    """The engine's device."""

    def __init__(self, census: Census) -> None:
        super().__init__(DEVICE)
        self._queue = _Queue(census)

    name = "bookkeeping"

    def make_current(self) -> None:
        return

    def new_stream(self) -> Any:
        return self._queue

    def current_stream(self) -> Any:
        return self._queue

    @contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        yield

    def record_event(self, stream: Any = None) -> Any:
        return self._queue

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype)  # this build cannot pin

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor

    def send(self, values: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(DEVICE, non_blocking=True)

    def rng_state(self) -> Tensor | None:
        return None

    def seed(self, seed: int) -> None:
        return


class FakeNccl:
    """`torch.distributed` of `NcclBackend`: checks what NCCL checks, and moves nothing."""

    def __init__(self, world_size: int, found: Findings, census: Census) -> None:
        self._world_size = world_size
        self._found = found
        self._work = _Queue(census)
        self.threads: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    def get_rank(self, group: Any = None) -> int:
        return 0

    def get_world_size(self, group: Any = None) -> int:
        return self._world_size

    def new_subgroups(self, size: int, group: Any = None) -> tuple[int, list[int]]:
        return size, [size]

    def all_reduce(self, tensor: Tensor, **options: Any) -> Any:
        return self._launch("all_reduce", tensor)

    def broadcast(self, tensor: Tensor, **options: Any) -> Any:
        return self._launch("broadcast", tensor)

    def all_gather(self, full: Tensor, part: Tensor, group: Any = None, **_: Any) -> Any:
        size = group if isinstance(group, int) else self._world_size
        return self._launch("all_gather", full, part, fits=full.numel() == size * part.numel())

    def reduce_scatter(self, out: Tensor, full: Tensor, **_: Any) -> Any:
        fits = full.numel() == self._world_size * out.numel()
        return self._launch("reduce_scatter", out, full, fits=fits)

    def all_to_all_single(self, out: Tensor, full: Tensor, **_: Any) -> Any:
        return self._launch("all_to_all_single", out, full, fits=out.numel() == full.numel())

    def all_to_all(self, outs: list[Tensor], sent: list[Tensor], **_: Any) -> Any:
        return self._launch("all_to_all", *outs, *sent)

    def gather(self, part: Tensor, parts: list[Tensor] | None, **_: Any) -> Any:
        return self._launch("gather", part, *(parts or ()))

    def _launch(self, name: str, *tensors: Tensor, fits: bool = True) -> Any:
        self.threads.add(threading.current_thread().name)
        for tensor in tensors:
            wrong = tensor.device.type != "cuda" or not tensor.is_contiguous() or not fits
            if wrong or tensor.dtype in _NO_NCCL_TYPE or tensor.dtype is not tensors[0].dtype:
                seen = [(str(it.device), str(it.dtype), tuple(it.shape)) for it in tensors]
                self._found.refused.append(f"{name} {seen} at {describe(current_place())}")
                break
        return self._work


def _tolist(census: Census, world_size: int) -> Any:
    """What the host reads is what a sum of ones over the ranks would be: the vote counts them."""

    def read(tensor: Tensor) -> Any:
        if tensor.device.type == "cuda":
            census.wait("tolist")
        return _filled(tuple(tensor.shape), float(world_size))

    return read


def _filled(shape: tuple[int, ...], value: float) -> Any:
    return [_filled(shape[1:], value) for _ in range(shape[0])] if shape else value


def _check_file_io(self: MappedFile, stored: Tensor, memory: Tensor) -> None:
    """Replaces reads and writes of a file: fake tensors have no bytes."""
    if memory.device.type != "cpu" or memory.dtype is not stored.dtype:
        raise TypeError(f"{memory.dtype} on {memory.device} for a file of {stored.dtype}")


class _RunAtOnce(ThreadPoolExecutor):
    """A fake tensor's device is another one while any thread runs its kernel."""

    def submit(self, call: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        future.set_result(call(*args, **kwargs))
        return future


@contextmanager
def _fused_optimizers() -> Iterator[None]:
    """Torch has no kernels on paper of these; they return nothing."""
    kernels = Library("aten", "IMPL", "Meta")
    for name in ("_fused_sgd_", "_fused_adagrad_"):
        kernels.impl(name, lambda *args, **options: None)
    yield
    kernels._destroy()


@contextmanager
def bookkeeping_device(found: Findings, world_size: int) -> Iterator[tuple[Census, FakeNccl]]:
    """Engines built within are on the device, one rank of `world_size`."""
    census = Census()
    nccl = FakeNccl(world_size, found, census)
    with ExitStack() as stack:
        stack.enter_context(replace_device(FakeCuda(census)))
        for target, name, new in (
            (nccl_module, "dist", nccl),
            (nccl_module, "_all_gather", nccl.all_gather),
            (nccl_module, "_reduce_scatter", nccl.reduce_scatter),
            (builder, "connect_collectives", lambda: (Collectives(NcclBackend(None)), DEVICE)),
            (nvme_store, "ThreadPoolExecutor", _RunAtOnce),
            (MappedFile, "read", _check_file_io),
            (MappedFile, "write", _check_file_io),
            (FakeTensor, "tolist", _tolist(census, world_size)),
            # The real one refuses tensors that others refer to weakly, as fake ones are.
            (torch.utils, "swap_tensors", torch._C._swap_tensor_impl),
        ):
            stack.enter_context(mock.patch.object(target, name, new))
        stack.enter_context(_fused_optimizers())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(census)
        yield census, nccl


def train(case: Case) -> Findings:
    """Trains a case for a few steps."""
    found = Findings(asdict(case))
    with bookkeeping_device(found, case.world_size) as (census, nccl):
        try:
            with DEVICE:
                model = MODELS[case.model]()
            engine = rayzero.initialize(model=model, config=case.config())[0]
            generator = torch.Generator()
            for step in range(STEPS):
                if step == 1:
                    before = census.syncs.copy()
                for _ in range(case.micro_steps):
                    batch = make_batch(case.model, generator).to(DEVICE, non_blocking=True)
                    engine.backward(engine(batch))
                    engine.step()
            new = census.syncs - before
            found.syncs_per_step = {what: n / (STEPS - 1) for what, n in new.items()}
            found.resting_bytes, found.peak_bytes = census.bytes.now, census.bytes.peak
            engine.close()
        except Exception:  # noqa: BLE001  a finding
            found.error = traceback.format_exc(limit=-6)
    found.hook_threads = sorted(nccl.threads)
    return found
