"""A worker on an asynchronous device: broken devices, groups that two threads abort, late errors.

The device is a CPU that claims to be asynchronous, so its group is aborted as NCCL's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from threading import Event, Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d

from rayzero.engine.comm import gloo_p2p
from rayzero.engine.comm.elastic_group import make_elastic_group
from rayzero.engine.device import CudaDevice, Device, DeviceError, replace_device
from rayzero.workers import process_group, worker
from rayzero.workers.group_sockets import SocketTracker
from rayzero.workers.messages import Crashed, StepReport, Stopped
from tests.workers.support import ASSIGN, MakeWorker, begin, poll_until, run_until

CPU = torch.device("cpu")


class AsynchronousDevice(Device):
    """Records what is asked of it."""

    asynchronous = True

    def __init__(self) -> None:
        super().__init__(CPU)
        self.calls: list[str] = []
        self.error: Exception | None = None

    def check_health(self, timeout_s: float) -> None:
        assert timeout_s > 0
        self.calls.append("check_health")
        if self.error is not None:
            raise self.error

    def synchronize(self, timeout_s: float | None = None) -> None:
        assert timeout_s is not None, "it may never return"
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")


@pytest.fixture
def device() -> Iterator[AsynchronousDevice]:
    device = AsynchronousDevice()
    with replace_device(device):
        yield device


@pytest.fixture
def aborts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The groups that were aborted."""
    seen: list[Any] = []
    abort = dist.ProcessGroup.abort

    def record(group: dist.ProcessGroup) -> None:
        seen.append(group)
        abort(group)

    monkeypatch.setattr(dist.ProcessGroup, "abort", record)
    return seen


def make_group() -> dist.ProcessGroup:
    """A generation's group, of this rank alone."""
    return make_elastic_group().form_group(HashStore(), backend="gloo")


def groups() -> list[dist.ProcessGroup]:
    """Those of generations that torch knows."""
    return [group for group in c10d._world.pg_names if group is not dist.group.WORLD]


@pytest.mark.usefixtures("device")
def test_two_threads_abort_a_group_once(monkeypatch: pytest.MonkeyPatch, aborts: list[Any]):
    """The second one comes while the first is in the abort, and makes the next group after it."""
    first, abort = make_group(), dist.ProcessGroup.abort
    aborting, may_end = Event(), Event()
    errors: list[BaseException] = []

    def slow_abort(group: dist.ProcessGroup) -> None:
        aborting.set()
        assert may_end.wait(20)
        abort(group)

    monkeypatch.setattr(dist.ProcessGroup, "abort", slow_abort)

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    def unwind_and_join() -> None:
        process_group.abort_default_group(CPU, SocketTracker())
        make_group()

    fence = Thread(
        target=run, args=[lambda: process_group.interrupt_collectives(CPU, SocketTracker())]
    )
    fence.start()
    assert aborting.wait(20)
    training = Thread(target=run, args=[unwind_and_join])
    training.start()
    training.join(0.05)
    assert training.is_alive(), "it waits for the abort in flight"
    may_end.set()
    for thread in (fence, training):
        thread.join(20)
    assert errors == []
    assert aborts == [first]
    assert first not in groups()
    assert len(groups()) == 1, "the next group was left alone"
    process_group.abort_default_group(CPU, SocketTracker())


@pytest.mark.usefixtures("device")
def test_next_group_can_be_made_after_an_abort_that_failed(monkeypatch: pytest.MonkeyPatch):
    make_group()

    def fail(group: dist.ProcessGroup) -> None:
        raise RuntimeError("NCCL error: unhandled cuda error")

    with monkeypatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "abort", fail)
        with pytest.raises(RuntimeError, match="NCCL"):
            process_group.abort_default_group(CPU, SocketTracker())
    assert groups() == []
    make_group()
    process_group.abort_default_group(CPU, SocketTracker())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sockets_are_shut_only_while_a_group_forms_unless_it_is_gloos(
    monkeypatch: pytest.MonkeyPatch, aborts: list[Any], asynchronous: bool
):
    sockets, shut = SocketTracker(), []
    monkeypatch.setattr(sockets, "shutdown", lambda: shut.append(len(aborts)))
    device = AsynchronousDevice() if asynchronous else Device(CPU)
    with replace_device(device):
        with sockets.recording(2):
            make_group()
            process_group.interrupt_collectives(CPU, sockets)
            assert (len(shut), aborts) == (1, [])
        process_group.interrupt_collectives(CPU, sockets)
        assert (len(shut), len(aborts)) == ((1, 1) if asynchronous else (2, 0))
        process_group.abort_default_group(CPU, sockets)
    assert (len(shut), len(aborts)) == ((1, 1) if asynchronous else (3, 1))


@pytest.mark.parametrize("healthy", [True, False])
def test_device_is_checked_before_a_stop_is_told(
    make_worker: MakeWorker,
    device: AsynchronousDevice,
    monkeypatch: pytest.MonkeyPatch,
    healthy: bool,
):
    ends: list[tuple[float, Any, list[int]]] = []
    monkeypatch.setattr(worker, "Timer", lambda *args: ends.append(args) or Thread())
    if not healthy:
        device.error = DeviceError("cuda:0 is broken: no answer within 10 s")
    process, _ = run_until(make_worker, "endless", StepReport)
    process.fence(1)
    messages = poll_until(process.poll, Stopped if healthy else Crashed)
    assert "check_health" in device.calls
    (end,) = [message for message in messages if isinstance(message, Stopped | Crashed)]
    if healthy:
        assert end == Stopped(1, 0)
        assert ends == []
        return
    assert isinstance(end, Crashed)
    assert (end.kind, end.error) == (
        "device",
        "rayzero.engine.device.DeviceError: cuda:0 is broken: no answer within 10 s",
    )
    ((after_s, leave, code),) = ends
    assert leave is worker.os._exit
    assert 0 < after_s < 60
    assert code == [worker.DEVICE_EXIT_CODE]


class ErrorType(Enum):
    SUCCESS = 0
    COMM_ERROR = 2


def test_late_error_of_the_group_ends_the_generation(
    make_worker: MakeWorker,
    device: AsynchronousDevice,
    monkeypatch: pytest.MonkeyPatch,
    aborts: list[Any],
):
    """As a failed collective: the rank that waits is not the one to blame."""
    state = ErrorType.SUCCESS
    monkeypatch.setattr(process_group, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(process_group, "_error_reader", lambda _: lambda: state)
    process, _ = run_until(make_worker, "endless", StepReport)
    state = ErrorType.COMM_ERROR
    messages = poll_until(process.poll, Crashed)
    (crash,) = [message for message in messages if isinstance(message, Crashed)]
    assert crash.kind == "collective"
    assert "reports COMM_ERROR" in crash.error
    assert len(aborts) == 1
    assert "check_health" in device.calls


def test_device_is_idle_and_the_last_group_gone_before_the_next_one(
    make_worker: MakeWorker, device: AsynchronousDevice, monkeypatch: pytest.MonkeyPatch
):
    process = make_worker("returns")
    for name in ("abort_default_group", "join_process_group"):
        call = getattr(process_group, name)

        def record(*args: Any, name: str = name, call: Callable[..., None] = call) -> None:
            device.calls.append(name)
            call(*args)

        monkeypatch.setattr(process_group, name, record)
    monkeypatch.setattr(
        process._retained, "begin_generation", lambda _: device.calls.append("begin_generation")
    )
    begin(process)
    poll_until(process.poll, StepReport)
    assert device.calls[:4] == [
        "abort_default_group",
        "synchronize",
        "begin_generation",
        "join_process_group",
    ]


def test_warm_up_makes_and_aborts_a_communicator(
    make_worker: MakeWorker,
    device: AsynchronousDevice,
    monkeypatch: pytest.MonkeyPatch,
    aborts: list[Any],
):
    """A spare's first step would take seconds longer: the context, libraries, the communicator."""
    sums: list[int] = []
    reduce = dist.all_reduce
    monkeypatch.setattr(device, "warm_up", lambda: device.calls.append("warm_up"))
    monkeypatch.setattr(device, "synchronize", lambda: device.calls.append("synchronize"))

    def record(*args: Any, **options: Any) -> Any:
        sums.append(dist.get_world_size(options["group"]))
        return reduce(*args, **options)

    monkeypatch.setattr(dist, "all_reduce", record)
    make_worker("returns").warm_up()
    assert device.calls == ["warm_up", "synchronize"]
    assert sums == [1]
    assert len(aborts) == 1
    assert groups() == []


def test_device_that_fails_while_it_is_warmed_up_fails_the_start(
    make_worker: MakeWorker, device: AsynchronousDevice, monkeypatch: pytest.MonkeyPatch
):
    """It is started again later: the memory of a process that is ending may be missing."""

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device, "warm_up", fail)
    with pytest.raises(torch.OutOfMemoryError):
        make_worker("returns").warm_up()
    assert groups() == []


def test_group_of_nccl_is_aborted_at_exit(monkeypatch: pytest.MonkeyPatch):
    """Its destruction waits for its peers; left alone, it warns and may hang."""
    calls: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))
    monkeypatch.setattr(gloo_p2p, "abort_default_group", lambda: calls.append("abort"))
    gloo_p2p._destroy_default_group()
    assert calls == ["abort"]


GPU = torch.device("cuda", 0)


class _MadeError(RuntimeError):
    """Ends what follows, for which a GPU would be needed."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is asked of the device and of torch, in order. A group that is not bound to its device
    makes its communicator in the first collective, on the thread's current device."""
    calls: list[Any] = []

    def make_group(ranks: list[int], **options: Any) -> None:
        calls.append((options["backend"], options["device_id"]))
        raise _MadeError

    monkeypatch.setattr(CudaDevice, "make_current", lambda self: calls.append("current"))
    monkeypatch.setattr(dist, "new_group", make_group)
    monkeypatch.setattr(process_group, "StoreClient", lambda *_: HashStore())
    with replace_device(CudaDevice(GPU)):
        yield calls


def join() -> None:
    process_group.join_process_group(ASSIGN, GPU, 1.0, SocketTracker())


@pytest.mark.parametrize("make", [join, lambda: process_group.warm_up_communicator(GPU)])
def test_group_of_nccl_is_bound_to_the_device(make: Callable[[], None], calls: list[Any]):
    with pytest.raises(_MadeError):
        make()
    assert calls == ["current", ("nccl", GPU)]
