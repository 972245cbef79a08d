"""Stage: five steps under torch's CUDA sanitizer, which finds accesses that no stream orders.

It sees torch's own kernels, copies and events. What NCCL does on its streams it takes for work of
the current stream: the detector of the tests (tests/engine) covers that.
"""

from __future__ import annotations

from typing import Any

from torch.cuda._sanitizer import cuda_sanitizer

from benchmarks.gpu.one_rank import (
    CPU_OFFLOAD,
    make_config,
    make_trainee,
    single_rank_group,
    store,
)
from benchmarks.gpu.report import Report, Settings

STEPS = 5
CASES: dict[str, dict[str, Any]] = {
    "stage 3": {"stage": 3},
    "stage 2, optimizer on the CPU": {"stage": 2, **CPU_OFFLOAD},
    "stage 3, all on the CPU": {"stage": 3, **CPU_OFFLOAD, "offload_param": {"device": "cpu"}},
}


def run(report: Report, settings: Settings) -> None:
    report.value("sanitizer enabled", cuda_sanitizer.enabled)
    if settings.on_gpu:
        enabled = cuda_sanitizer.enabled
        report.check("sanitizer", enabled, enabled, "enabled by TORCH_CUDA_SANITIZER")
    else:
        report.skip("findings", "without a GPU there are no streams: the steps only run")
    for name, case in CASES.items():
        with single_rank_group(store(settings, name)):
            trainee = make_trainee(settings, make_config(**case))
            try:
                losses = trainee.steps(STEPS)
            except Exception as error:  # noqa: BLE001  its errors are not exported by torch
                report.check(name, False, f"{type(error).__name__}: {error}"[:1000], "no error")
            else:
                report.check(name, losses[-1] < losses[0], losses, "a falling loss, no error")
            trainee.engine.close()
