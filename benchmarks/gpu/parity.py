"""Stage: training equals plain torch; a checkpoint resumes bit by bit; an overflow changes nothing.

fp64 and bf16, stages 0 to 3, 1 and 3 micro-steps, and every offload; NCCL with sharded stages on
one rank, and one rank as it is (stage 0, no collectives). Without a GPU NCCL's cases are fp64 only,
and collectives are copies.
"""

from __future__ import annotations

from benchmarks.gpu.pytests import run_tests
from benchmarks.gpu.report import Report, Settings

SELECT = (
    "(equals_plain_torch and nccl and ({precisions})) or overflow or resume"
    " or (test_equals_plain_torch and local-0 and (fp64 or bf16))"
)


def run(report: Report, settings: Settings) -> None:
    precisions = "fp64" if settings.small else "fp64 or bf16"
    run_tests(report, settings, SELECT.format(precisions=precisions))
