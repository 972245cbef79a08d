"""The stages, in their order: what is wrong shows before anything is timed."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stage:
    """A part of the run, in a process of its own.

    Attributes:
        module: its `run(report, settings)` is the stage; or `module:function`.
        minutes: its share of ten.
        correctness: whether a failed check means that results are wrong, not only slow.
        environment: on a GPU, set before its process imports torch.
    """

    name: str
    title: str
    module: str
    minutes: float
    correctness: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def _stage(
    name: str, minutes: float, title: str, *, correctness: bool = False, **environment: str
) -> Stage:
    module = f"benchmarks.gpu.{name.replace('-', '_')}"
    return Stage(name, title, module, minutes, correctness, environment)


STAGES = (
    _stage("versions", 0.25, "versions, driver, PCIe link, MIG, cuMem, limits"),
    _stage(
        "streams", 0.75, "the GPU tests but parity: transfers, streams, memory", correctness=True
    ),
    _stage("parity", 1.5, "equal to plain torch at every stage, with offloads", correctness=True),
    _stage(
        "sanitizer",
        0.5,
        "five steps under torch's CUDA sanitizer",
        correctness=True,
        TORCH_CUDA_SANITIZER="1",
    ),
    _stage("resting", 0.5, "memory is that of step 3, and as planned", correctness=True),
    _stage(
        "groups", 1.0, "process groups made and aborted; abort of a host read", correctness=True
    ),
    _stage(
        "device-assert", 0.5, "a device-side assert: what rayzero makes of it", correctness=True
    ),
    _stage("two-ranks", 0.5, "two ranks, one of which is killed in a sum", correctness=True),
    _stage("transfers", 0.75, "copies between host and GPU: pageable, registered"),
    _stage("compiled", 1.0, "torch.compile by block and whole", correctness=True),
    _stage("compare", 1.75, "steps and memory against DDP, FSDP2 and DeepSpeed"),
    _stage("profiles", 0.3, "where a step of stages 2 and 3 goes"),
    _stage("mirrors", 0.5, "mirroring: training thread, copies, a step"),
    _stage("ray-job", 0.7, "a job whose worker is killed"),
)
