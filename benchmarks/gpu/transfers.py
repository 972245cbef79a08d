"""Stage: copies between a vault's kind of memory (memfd) and the GPU: pageable, registered, beside
matrix products; and what registering costs, with small and with huge pages."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

import torch
from torch import Tensor

from benchmarks.gpu.report import Report, Settings
from rayzero.engine.device import get_device
from rayzero.engine.errors import EngineError

NBYTES, SMALL_NBYTES = 8 << 30, 8 << 20
REPEATS = 2  # of 8 GB: three seconds each where it is slow
MATRIX, SMALL_MATRIX = 8192, 256
PRODUCTS = 40  # 56 ms at 790 TFLOP/s
MADV_HUGEPAGE = 14
MFD_HUGETLB = 4
KINDS = ("4K pages", "transparent huge pages", "reserved huge pages")


def run(report: Report, settings: Settings) -> None:
    nbytes = SMALL_NBYTES if settings.small else min(NBYTES, _available_bytes() // 4)
    report.value("nbytes", nbytes)
    device = torch.zeros(nbytes, dtype=torch.uint8, device=settings.device)  # with its index
    if not settings.on_gpu:
        report.skip("registered memory, copies beside products", "no GPU: plain copies only")
    for kind in KINDS:
        try:
            with memfd_tensor(nbytes, kind) as host:
                _measure(report, settings, kind, host, device)
        except OSError as error:
            report.skip(kind, f"{error}")
    if settings.on_gpu:
        with _timed_value(report, "cudaHostAlloc_s", settings):
            pinned = get_device(device.device).host_empty(nbytes, torch.uint8)
        _rates(report, settings, "allocated pinned", pinned, device)


def _measure(report: Report, settings: Settings, kind: str, host: Tensor, device: Tensor) -> None:
    with _timed_value(report, f"{kind}: first touch_s", settings):
        host.fill_(1)
    if kind == KINDS[0]:
        _rates(report, settings, f"{kind}, pageable", host, device)
    if not settings.on_gpu:
        return
    own = get_device(device.device)
    try:
        with _timed_value(report, f"{kind}: registering_s", settings):
            own.register_host(host)
    except EngineError as error:
        report.check(f"{kind}: registered", False, error, "no error")
        return
    _rates(report, settings, f"{kind}, registered", host, device)
    if kind == KINDS[0]:
        _beside_products(report, settings, host, device)
    torch.cuda.synchronize()
    with _timed_value(report, f"{kind}: unregistering_s", settings):
        own.unregister_host(host)


def _rates(report: Report, settings: Settings, name: str, host: Tensor, device: Tensor) -> None:
    """Both directions alone, and whether the bytes arrive."""
    device.fill_(7)
    to_host = time_copy(settings, lambda: host.copy_(device, non_blocking=True))
    report.value(f"{name}: device to host_gb_s", host.nbytes / to_host / 1e9)
    sample = host[:: max(1, host.numel() // 1000)]
    report.check(f"{name}: bytes", bool((sample == 7).all()), int(sample[0]), "7")
    to_device = time_copy(settings, lambda: device.copy_(host, non_blocking=True))
    report.value(f"{name}: host to device_gb_s", host.nbytes / to_device / 1e9)


def time_copy(settings: Settings, copy: Callable[[], object]) -> float:
    """Seconds of the fastest of a few copies."""
    seconds = []
    for _ in range(REPEATS):
        _synchronize(settings)
        started_s = monotonic()
        copy()
        _synchronize(settings)
        seconds.append(monotonic() - started_s)
    return min(seconds)


def _beside_products(report: Report, settings: Settings, host: Tensor, device: Tensor) -> None:
    """What a copy on a stream of its own costs matrix products, and they it."""
    size = SMALL_MATRIX if settings.small else MATRIX
    left = torch.randn(size, size, dtype=torch.bfloat16, device=settings.device)
    out = torch.empty_like(left)
    side = torch.cuda.Stream()
    _products(left, out)
    alone_s = _products(left, out)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(side):
        start.record()
        host.copy_(device, non_blocking=True)
        end.record()
    beside_s = 0.0
    rounds = 0
    while rounds == 0 or not end.query():
        beside_s += _products(left, out)
        rounds += 1
    torch.cuda.synchronize()
    copy_s = start.elapsed_time(end) / 1e3
    report.value("registered, beside products: device to host_gb_s", host.nbytes / copy_s / 1e9)
    report.value("products beside the copy, ratio", beside_s / rounds / alone_s)
    report.value("products alone_tflop_s", 2 * size**3 * PRODUCTS / alone_s / 1e12)


def _products(left: Tensor, out: Tensor) -> float:
    """Seconds of some products on the current stream; waits for them only."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(PRODUCTS):
        torch.mm(left, left, out=out)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@contextmanager
def memfd_tensor(nbytes: int, kind: str = KINDS[0]) -> Iterator[Tensor]:
    """Shared anonymous memory like a vault's. Raises OSError if that kind of page is not there."""
    flags = MFD_HUGETLB if kind == KINDS[2] else 0
    descriptor = os.memfd_create("rz-gpu", flags)
    try:
        os.ftruncate(descriptor, nbytes)
        memory = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
    finally:
        os.close(descriptor)
    if kind == KINDS[1]:
        memory.madvise(MADV_HUGEPAGE)
    yield torch.frombuffer(memory, dtype=torch.uint8)  # unmapped with the last tensor over it


@contextmanager
def _timed_value(report: Report, name: str, settings: Settings) -> Iterator[None]:
    _synchronize(settings)
    started_s = monotonic()
    yield
    _synchronize(settings)
    report.value(name, monotonic() - started_s)


def _synchronize(settings: Settings) -> None:
    if settings.on_gpu:
        torch.cuda.synchronize()


def _available_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
