"""The catalog of all Prometheus metrics, and the walk over it at a scrape.

A metric is one row: name, kind, unit, help, and where its value is read. `docs/metrics.md` is
generated from the rows. Names follow the Prometheus conventions: base units, `_total` on counters,
times as Unix seconds under `_timestamp_seconds`. Every metric has the label `job`, so scrapes must
honor labels. Those with the label `rank` have one series for each rank of the newest generation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from prometheus_client.core import Metric

from rayzero.orchestrator.metrics.catalog_recovery import RECOVERY_GROUPS
from rayzero.orchestrator.metrics.catalog_training import TRAINING_GROUPS
from rayzero.orchestrator.metrics.job_metrics import JobMetrics, Timestamps
from rayzero.orchestrator.metrics.rank_metrics import RankMetricsTable
from rayzero.orchestrator.metrics.series import JobReading, JobSeries, RankSeries

CATALOG_GROUPS: Mapping[str, tuple[JobSeries | RankSeries, ...]] = {
    **TRAINING_GROUPS,
    **RECOVERY_GROUPS,
}
CATALOG = {series.name: series for series in chain.from_iterable(CATALOG_GROUPS.values())}
_JOB_SERIES = [series for series in CATALOG.values() if isinstance(series, JobSeries)]
_RANK_SERIES = [series for series in CATALOG.values() if isinstance(series, RankSeries)]

JOURNAL_FIELDS = [series.journal_field for series in _JOB_SERIES if series.journal_field]
"""Fields of `StepTotals` that the journal stores for a run that is adopted."""

BUILTIN_GAUGES = frozenset(series.gauge for series in CATALOG.values()) | {
    *("step", "samples", "step_samples", "step_tokens", "tokens_per_s", "flops_per_s"),
    *("skipped", "skipped_steps", "checkpoint_s", "replica_step", "replica_bytes"),
}
"""Names that engines and workers report."""
_BUILTIN_PREFIXES = ("phases/", "bytes/", "collectives/")


def user_gauges(gauges: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """The values that the training function reports: those that no engine or worker does."""
    for name, value in gauges.items():
        if name not in BUILTIN_GAUGES and not name.startswith(_BUILTIN_PREFIXES):
            yield name, value


def job_families(metrics: JobMetrics, now: Timestamps) -> Iterator[Metric]:
    """The metrics of the job as a whole that have a value now. Takes about a millisecond."""
    reading = JobReading(metrics, now)
    for series in _JOB_SERIES:
        family = series.family(metrics.info.name, reading)
        if family.samples:
            yield family


def rank_families(job: str, ranks: RankMetricsTable) -> Iterator[Metric]:
    """The metrics with one series for each rank, and the sums over ranks."""
    for series in _RANK_SERIES:
        family = series.family(job, ranks)
        if family.samples:
            yield family
