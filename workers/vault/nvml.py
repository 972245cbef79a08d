"""The health of this node's GPUs, read from the NVIDIA driver and the kernel's log."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

_HARDWARE_SLOWDOWN = 0x8 | 0x40 | 0x80
"""nvmlClocksEventReason: HwSlowdown, HwThermalSlowdown, HwPowerBrakeSlowdown. The driver's own
limits of power and temperature are not included, because they are usual in training."""
_BROKEN_XIDS = frozenset({48, 64, 74, 79, 95, 119, 120})
"""Xids of broken memory, broken links and lost GPUs. Others are program errors or corrected."""
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
_KERNEL_LOG = "/dev/kmsg"


def gpu_figures(kernel_log: str = _KERNEL_LOG) -> dict[str, float]:
    """Returns figures by check and GPU, such as `gpu_ecc/0`; none without a GPU, its driver or
    `nvidia-ml-py`. Checks that a GPU or the driver does not support are left out."""
    nvml: Any
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return {}
    except nvml.NVMLError:  # no driver
        return {}
    try:
        xids = dict(_broken_xids(kernel_log))
        figures: dict[str, float] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            for name, read in _READINGS.items():
                with suppress(nvml.NVMLError):
                    figures[f"{name}/{index}"] = float(read(nvml, device))
            with suppress(nvml.NVMLError):
                bus = nvml.nvmlDeviceGetPciInfo(device).busId
                if code := xids.get(_bus_number(bus if isinstance(bus, str) else bus.decode())):
                    figures[f"gpu_xid/{index}"] = float(code)
        return figures
    finally:
        nvml.nvmlShutdown()


def _ecc_errors(nvml: Any, device: Any) -> int:
    kind, since_load = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    return int(nvml.nvmlDeviceGetTotalEccErrors(device, kind, since_load))


def _unmapped_rows(nvml: Any, device: Any) -> int:
    _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(device)
    return int(pending) + int(failed)


def _slowdowns(nvml: Any, device: Any) -> int:
    return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)) & _HARDWARE_SLOWDOWN


_READINGS: dict[str, Callable[[Any, Any], int]] = {
    "gpu_ecc": _ecc_errors,
    "gpu_rows": _unmapped_rows,
    "gpu_throttle": _slowdowns,
}


def _broken_xids(kernel_log: str) -> Iterator[tuple[str, int]]:
    """Yields a GPU's number on the PCI bus and the Xid for each error of broken hardware in the
    log, the oldest first. Yields nothing if this process may not read the log."""
    with suppress(OSError):
        log = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while text := _next_record(log):
                for bus, code in _XID.findall(text):
                    if int(code) in _BROKEN_XIDS:
                        yield _bus_number(bus), int(code)
        finally:
            os.close(log)


def _next_record(log: int) -> str:
    """Returns the next record of the kernel's log; an empty string at the end."""
    while True:
        try:
            return os.read(log, 8192).decode(errors="replace")
        except BrokenPipeError:
            continue  # the kernel has overwritten records
        except BlockingIOError:
            return ""


def _bus_number(bus: str) -> str:
    """Returns `17:00` for `00000000:17:00.0`, as the driver and the kernel's log write it."""
    return bus.lower().partition(".")[0].split(":", 1)[-1]
