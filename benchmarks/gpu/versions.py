"""Stage: what the machine is. A number measured elsewhere means nothing without it."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.report import Report, Settings
from rayzero.engine.torch_probe import describe_torch
from rayzero.workers.nccl_settings import contradictions

PACKAGES = ("numpy", "pydantic", "hjson", "safetensors", "xxhash", "ray", "deepspeed", "triton")
QUERY = (
    "name,driver_version,pci.bus_id,memory.total,memory.used,mig.mode.current,persistence_mode,"
    "compute_mode,ecc.mode.current,pcie.link.gen.current,pcie.link.gen.max,"
    "pcie.link.width.current,pcie.link.width.max,clocks.sm,clocks.max.sm,power.limit"
)
# From cuda.h: CU_DEVICE_ATTRIBUTE_...
ATTRIBUTES = {
    "virtual memory (cuMem)": 102,
    "cuMem handles as file descriptors": 103,
    "cuMem handles by fabric": 128,
    "multicast (NVLS)": 132,
}
# Methods of torch's Backend that a repair could use: docs/faults.md.
BACKEND_METHODS = ("abort", "suspend", "resume", "memory_stats", "get_error")
VARIABLES = ("NCCL_", "TORCH_NCCL_", "CUDA_", "PYTORCH_", "OMP_")


def run(report: Report, settings: Settings) -> None:
    report.value("kernel", platform.release())
    report.value("python", platform.python_version())
    for name, fact in describe_torch().items():
        report.value(name, fact)
    report.value("packages", {name: _version(name) for name in PACKAGES})
    report.value("environment", {k: v for k, v in os.environ.items() if k.startswith(VARIABLES)})
    report.value("memory", _memory())
    report.value("locked memory, limit", _limit(resource.RLIMIT_MEMLOCK))
    report.value("open files, limit", _limit(resource.RLIMIT_NOFILE))
    opposed = [text for _, text in contradictions(os.environ)]
    report.check("NCCL's settings", not opposed, opposed or "ours", "none that repair contradicts")
    if dist.is_available():
        backend = torch._C._distributed_c10d.Backend
        report.value("of Backend", [it for it in BACKEND_METHODS if hasattr(backend, it)])
    if not settings.on_gpu:
        report.skip("nvidia-smi, cuMem", "no GPU")
        return
    gpu = _query_driver()
    for name, fact in gpu.items():
        report.value(name, fact)
    for name, number in ATTRIBUTES.items():
        report.value(name, _attribute(number))
    mig = gpu.get("mig.mode.current", "unknown")
    report.check("MIG", mig not in ("Enabled",), mig, "off: NCCL has no peer access between slices")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _memory() -> dict[str, str]:
    """Of the host: total, available and huge pages; of this control group."""
    found = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        if name in ("MemTotal", "MemAvailable", "HugePages_Total", "Hugepagesize"):
            found[name] = amount.strip()
    for name in ("enabled", "shmem_enabled"):
        path = Path("/sys/kernel/mm/transparent_hugepage", name)
        found[f"transparent huge pages, {name}"] = (
            path.read_text().strip() if path.exists() else "?"
        )
    limit = Path("/sys/fs/cgroup/memory.max")
    found["control group's limit"] = limit.read_text().strip() if limit.exists() else "?"
    return found


def _limit(kind: int) -> str:
    soft = resource.getrlimit(kind)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"


def _query_driver() -> dict[str, str]:
    """nvidia-smi's answers about GPU 0; empty without it."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if answer.returncode:
        return {"nvidia-smi": (answer.stdout + answer.stderr).strip()[:200]}
    cells = [cell.strip() for cell in answer.stdout.strip().split(",")]
    return dict(zip(QUERY.split(","), cells, strict=False))


def _attribute(number: int) -> Any:
    """A device attribute by the driver's library; torch has no function for these."""
    torch.cuda.init()
    driver = ctypes.CDLL("libcuda.so.1")
    value = ctypes.c_int(-1)
    error = driver.cuDeviceGetAttribute(ctypes.byref(value), number, 0)
    return f"error {error}" if error else bool(value.value)
