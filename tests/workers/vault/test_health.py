"""The check of a node: real processes, and a fake NVML."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayzero.workers.vault import health, node_probe
from rayzero.workers.vault.health import HealthCheck, HealthReport
from rayzero.workers.vault.node_probe import measure_compute, measure_disk, measure_memory
from rayzero.workers.vault.nvml import gpu_figures


def finished(check: HealthCheck) -> HealthReport:
    assert check._thread is not None
    check._thread.join(120)
    report = check.report()
    assert report is not None
    return report


def test_a_slowed_node_measures_less_and_the_report_has_the_time_of_its_reading() -> None:
    check = HealthCheck()
    assert check.report() is None
    check.begin(60)
    usual = finished(check)
    assert (usual.errors, usual.incomplete) == ({}, "")
    assert usual.figures["compute_errors"] == usual.figures["memory_errors"] == 0
    assert 0 < usual.figures["shared_memory"] < 2**20
    check.slower = health.SLOWER
    check.begin(120)
    slow = finished(check)
    for speed in ("compute", "memory"):
        assert slow.figures[speed] < usual.figures[speed] / 3, speed
    assert abs(slow.unix_s - time.time()) < 30


@pytest.mark.parametrize("ends_by", ["limit", "close"])
def test_a_check_that_hangs_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    """What was measured before is kept."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(health, "NODE_PROBE", "hangs")
    ready = tmp_path / "pid"
    (tmp_path / "hangs.py").write_text(
        "import os, pathlib, time\n"
        'print(\'{"memory": 3.0, "disk": "Input/output error"}\', flush=True)\n'
        f"pathlib.Path({str(ready)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    check = HealthCheck()
    check.begin(2 if ends_by == "limit" else 600)
    check.begin(600)  # it is in progress
    if ends_by == "close":
        deadline_s = time.monotonic() + 60
        while not (ready.exists() and ready.read_text()):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        check.close()
    report = finished(check)
    if ends_by == "limit":
        assert report.incomplete == "no answer within 2 s"
    if ready.exists():
        assert (report.figures, report.errors) == ({"memory": 3.0}, {"disk": "Input/output error"})
        assert not Path(f"/proc/{ready.read_text()}").exists()
    check.close()
    check.begin(5)
    assert check.report() == HealthReport(
        report.figures, report.errors, report.incomplete, pytest.approx(time.time(), abs=30)
    ), "none begins after the end"


def test_wrong_results_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    def flips(*args: Any, **_: Any) -> None:
        target = next(it for it in args if it.size == node_probe._COPY_BYTES // 8)
        target[5] ^= np.uint64(1)

    multiply = np.matmul
    monkeypatch.setattr(node_probe, "_ROUND_CPU_S", 0.001)
    with monkeypatch.context() as broken:
        broken.setattr(np, "matmul", lambda a, b, out: np.add(multiply(a, b), 1, out=out))
        broken.setattr(np, "copyto", flips)
        assert measure_compute(1)["compute_errors"] == measure_memory(1)["memory_errors"] == 1
    assert measure_compute(1)["compute_errors"] == measure_memory(1)["memory_errors"] == 0


def test_a_disk_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert measure_disk(1)["disk"] > 0
    assert not os.listdir(tmp_path)

    def fails(_: int) -> None:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output error"):
        measure_disk(1)


class NvmlError(Exception):
    """NVMLError_NotSupported and the like."""


def fake_nvml(**broken: Any) -> SimpleNamespace:
    """Of two GPUs; of the first one, another value of some functions."""

    def reading(name: str, value: Any) -> Any:
        def read(device: int, *_: int) -> Any:
            result = broken.get(name, value) if device == 0 else value
            if isinstance(result, Exception):
                raise result
            return result

        return read

    ended: list[bool] = []
    return SimpleNamespace(
        NVMLError=NvmlError,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        ended=ended,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: ended.append(True),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEccErrors=reading("ecc", 0),
        nvmlDeviceGetRemappedRows=reading("rows", (3, 1, 0, 0)),
        nvmlDeviceGetCurrentClocksThrottleReasons=reading("clocks", 0x1 | 0x4 | 0x20),
        nvmlDeviceGetPciInfo=lambda index: SimpleNamespace(busId=f"00000000:{17 + index}:00.0"),
    )


WELL = {f"{name}/{gpu}": 0.0 for gpu in (0, 1) for name in ("gpu_ecc", "gpu_rows", "gpu_throttle")}


@pytest.mark.parametrize(
    ("broken", "log", "figures"),
    [
        ({}, "", WELL),
        ({"ecc": 2}, "", WELL | {"gpu_ecc/0": 2.0}),
        ({"rows": (3, 1, 1, 1)}, "", WELL | {"gpu_rows/0": 2.0}),
        ({"clocks": 0x4 | 0x8 | 0x40}, "", WELL | {"gpu_throttle/0": 72.0}),
        ({"ecc": NvmlError()}, "", {k: v for k, v in WELL.items() if k != "gpu_ecc/0"}),
        ({}, "NVRM: Xid (PCI:0000:17:00): 79, pid=1\n", WELL | {"gpu_xid/0": 79.0}),
        ({}, "NVRM: Xid (PCI:0000:18:00): 31, pid=1\nNVRM: Xid (PCI:0000:18:00): 13\n", WELL),
    ],
)
def test_gpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: dict[str, Any],
    log: str,
    figures: dict[str, float],
) -> None:
    nvml = fake_nvml(**broken)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    (tmp_path / "kmsg").write_text(log)
    assert gpu_figures(str(tmp_path / "kmsg")) == figures
    assert nvml.ended == [True]
    assert gpu_figures(str(tmp_path / "none")).keys() >= WELL.keys() - {"gpu_ecc/0"}


def test_without_a_driver_or_its_library_nothing_is_said_of_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = fake_nvml()

    def no_driver() -> None:
        raise NvmlError

    nvml.nvmlInit = no_driver
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    assert gpu_figures() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    assert gpu_figures() == {}
