"""Stage: five steps under torch's CUDA sanitizer, which finds accesses that no stream orders.

It sees torch's own kernels, copies and events. What NCCL does on its streams it takes for work of
the current stream. Without a GPU the tests' detector runs similar cases on its virtual accelerator,
which knows NCCL's streams, too.
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
VIRTUAL_CASES: list[dict[str, Any]] = [
    {"stage": 3},
    {"stage": 2, "offload": "optimizer"},
    {"stage": 3, "offload": "both"},
]


def run(report: Report, settings: Settings) -> None:
    if not settings.on_gpu:
        _run_virtual(report)
        return
    report.check("sanitizer", cuda_sanitizer.enabled, cuda_sanitizer.enabled, "enabled")
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


def _run_virtual(report: Report) -> None:
    from tests.support.races.cases import Case
    from tests.support.races.running import run_ranks

    report.skip("torch's sanitizer", "no GPU: the detector on a virtual accelerator instead")
    for fields in VIRTUAL_CASES:
        ranks = run_ranks(Case(**fields))
        name = ", ".join(f"{key} {value}" for key, value in fields.items())
        seen = "; ".join(str(findings) for findings in ranks)
        clean = all(findings.clean for findings in ranks)
        report.check(name, clean, seen, "no race, nothing freed early")
        report.value(f"{name}: host waits a step", sum(ranks[0].syncs_per_step.values()))
