"""The device: reads, replacement in tests, limits on calls that hang, and which errors end it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from rayzero.engine import device as device_module
from rayzero.engine.device import (
    CudaDevice,
    Device,
    DeviceError,
    get_device,
    is_device_failure,
    local_device,
    replace_device,
)

CPU = torch.device("cpu")


def test_numbers_arrive_and_come_back() -> None:
    device = get_device(CPU)
    sent = device.send([1.5, 2.0, 3.0], torch.float64)
    assert sent.dtype is torch.float64
    assert device.read(sent.view(3, 1)) == [1.5, 2.0, 3.0]
    assert device.read(torch.tensor(7)) == [7.0]


def test_replaced_device_is_seen_by_all_threads() -> None:
    original, first, second = get_device(CPU), Device(CPU), Device(CPU)
    seen = []
    with replace_device(first):
        with replace_device(second):
            thread = threading.Thread(target=lambda: seen.append(get_device(CPU)))
            thread.start()
            thread.join(10)
        seen.append(get_device(CPU))
    assert seen == [second, first]
    assert get_device(CPU) is original


class UnavailableGpu(CudaDevice):
    """A GPU whose driver is replaced by a function."""

    def __init__(self, driver: Callable[[], None]) -> None:
        super().__init__(torch.device("cuda", 0))
        self.make_current = driver  # type: ignore[method-assign]


def test_health_check_that_hangs_ends_at_its_limit() -> None:
    ended = threading.Event()
    try:
        with pytest.raises(DeviceError, match=r"cuda:0 is broken: no answer within 0.05 s"):
            UnavailableGpu(lambda: ended.wait(30) and None).check_health(0.05)
    finally:
        ended.set()


def test_health_check_that_fails_is_a_device_error() -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    with pytest.raises(DeviceError, match="uncorrectable ECC"):
        UnavailableGpu(fail).check_health(30)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), True),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `x`"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (torch.AcceleratorError("CUDA error: invalid configuration argument"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("the loss is an unknown error"), False),
    ],
)
def test_errors_that_end_a_device(error: BaseException, expected: bool) -> None:
    assert is_device_failure(error) is expected


@pytest.mark.parametrize(("local_rank", "index"), [("0", 0), ("3", 1), (None, 1)])
def test_local_device_is_among_the_visible_ones(
    local_rank: str | None, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch, "accelerator", SimpleNamespace(current_device_index=lambda: 1), raising=True
    )
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert local_device() == torch.device("cuda", index)


def test_local_device_without_gpus_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "device_count", lambda: 0)
    assert local_device() == CPU
