"""Judges what the nodes of a job have measured: which nodes fail, by what figure and limit. Pure.

Speeds have no absolute limit: they are compared with the median of the job's nodes. There must be
three nodes, so that one alone can be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from rayzero.workers.vault.health import HealthReport

LEAST_NODES = 3
"""With fewer nodes, the median does not show which one is slow."""


@dataclass(frozen=True)
class Check:
    """The title and the limits of a check.

    Args:
        scale: for a speed: the factor of `health.slow_factor` in its limit.
        least, most: the limits of other figures.
    """

    title: str
    unit: str
    fix: str
    scale: float = 0.0
    least: float | None = None
    most: float | None = None


_HARDWARE = "drain the machine, and have its memory and processor tested"
_GPU = "reset the GPU or restart the machine; have it replaced if it fails again (nvidia-smi -q)"

CHECKS: Mapping[str, Check] = {
    "compute": Check(
        "computing", "GFLOP/s", "look for a throttled or shared processor there", scale=1.0
    ),
    "memory": Check(
        "memory bandwidth",
        "GB/s",
        "look for missing memory modules or a noisy neighbour",
        scale=1.0,
    ),
    # Measured in wall time, which a busy machine lengthens.
    "network": Check(
        "bandwidth to its neighbours", "GB/s", "look at its network's link and cable", scale=0.5
    ),
    "compute_errors": Check("wrong products", "", _HARDWARE, most=0),
    "memory_errors": Check("wrong copies in memory", "", _HARDWARE, most=0),
    "disk": Check("free disk space", "GiB", "free space where TMPDIR is", least=1),
    "shared_memory": Check(
        "memory for copies", "GiB", "raise the memory limit of its containers", least=0.25
    ),
    "clock": Check("difference of its clock", "s", "synchronize its clock (NTP)", most=5),
    "gpu_ecc": Check("uncorrectable ECC errors", "", _GPU, most=0),
    "gpu_rows": Check("memory rows to be remapped", "", _GPU, most=0),
    "gpu_xid": Check("Xid since its start", "", _GPU, most=0),
    "gpu_throttle": Check(
        "hardware slowdown (bits)", "", "look at its cooling and power supply", most=0
    ),
}
"""The checks, by the name of their figures."""


@dataclass(frozen=True)
class FailedCheck:
    """A failed check of a node. `is_relative` is whether it was compared with other nodes' speeds,
    which change."""

    text: str
    fix: str
    is_relative: bool = False


def judge(
    reports: Mapping[str, HealthReport], slow_factor: float
) -> dict[str, tuple[FailedCheck, ...]]:
    """Returns the nodes that fail, with their failed checks.

    Args:
        reports: by node.
        slow_factor: `health.slow_factor`.
    """
    limits = _relative_limits(reports.values(), slow_factor)
    failed = {node: tuple(_failures(report, limits)) for node, report in reports.items()}
    return {node: checks for node, checks in failed.items() if checks}


def describe(failures: Iterable[FailedCheck]) -> str:
    """Returns `memory bandwidth 3.1 GB/s, limit 6 GB/s (half ...); fix: ...` for each check."""
    return "; ".join(f"{failed.text}; fix: {failed.fix}" for failed in failures)


def describe_speeds(report: HealthReport) -> str:
    """Returns `computing 51.3 GFLOP/s, memory bandwidth 9.8 GB/s`."""
    return ", ".join(
        f"{check.title} {report.figures[name]:.3g} {check.unit}"
        for name, check in CHECKS.items()
        if check.scale and name in report.figures
    )


def best_of(first: HealthReport, second: HealthReport) -> HealthReport:
    """Returns the newer report, with the higher value of each speed: a node counts as slow only if
    it is slow twice."""
    speeds = {
        name: max(figure, second.figures.get(name, 0.0))
        for name, figure in first.figures.items()
        if name in CHECKS and CHECKS[name].scale
    }
    return HealthReport(
        {**second.figures, **speeds}, second.errors, second.incomplete, second.unix_s
    )


def _relative_limits(
    reports: Iterable[HealthReport], slow_factor: float
) -> dict[str, tuple[float, str]]:
    """Returns each speed's limit, and how it was computed."""
    reports, limits = tuple(reports), {}
    for name, check in CHECKS.items():
        figures = [report.figures[name] for report in reports if name in report.figures]
        if check.scale and len(figures) >= LEAST_NODES:
            factor = slow_factor * check.scale
            text = f"{factor:g} of the median of {len(figures)} nodes"
            limits[name] = factor * median(figures), text
    return limits


def _failures(
    report: HealthReport, limits: Mapping[str, tuple[float, str]]
) -> Iterable[FailedCheck]:
    for name, error in report.errors.items():
        check = CHECKS.get(name)
        title = check.title if check is not None else name
        yield FailedCheck(f"{title}: {error}", check.fix if check is not None else _HARDWARE)
    for key, figure in report.figures.items():
        name, _, gpu = key.partition("/")
        if (check := CHECKS.get(name)) is None:
            continue
        limit, reason = limits.get(name, (check.least, ""))
        too_low = limit is not None and figure < limit
        too_high = check.most is not None and figure > check.most
        if not (too_low or too_high):
            continue
        what = f"GPU {gpu}: {check.title}" if gpu else check.title
        allowed = check.most if too_high else limit
        unit, origin = f" {check.unit}" if check.unit else "", f" ({reason})" if reason else ""
        text = f"{what} {figure:.3g}{unit}, limit {allowed:.3g}{unit}{origin}"
        yield FailedCheck(text, check.fix, is_relative=bool(reason))
