"""Metrics of a job's data and streams, and the streams' part of the job's snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rayzero.orchestrator.metrics.job_metrics import JobMetrics
from rayzero.orchestrator.metrics.series import counter, gauge, step_gauge
from rayzero.orchestrator.metrics.stream_table import SourceValues


def stream_rows(job: JobMetrics) -> dict[str, dict[str, Any]]:
    """Returns the rows of the streams' sources for the snapshot, by source."""
    return {
        source: {
            **{kind: values.totals[kind] for kind in ("samples", "blocks", "bytes")},
            **{f"{kind}_per_s": amount for kind, amount in values.per_s.items()},
            "share": values.share,
            "hit_ratio": values.hit_ratio,
        }
        for source, values in job.streams.by_source.items()
    }


def _of_sources(
    read: Callable[[SourceValues], float],
) -> Callable[[JobMetrics], Mapping[str, float]]:
    """Returns a reader of one value of each source."""
    return lambda job: {source: read(values) for source, values in job.streams.by_source.items()}


def _block_uses(job: JobMetrics) -> Mapping[tuple[str, ...], float]:
    """Returns how often batches took rows of a block, by source and `result`."""
    return {
        (source, result): values.totals[f"{result}s"]
        for source, values in job.streams.by_source.items()
        for result in ("hit", "wait")
    }


DATA_SERIES = (
    gauge(
        "rayzero_data_wait_ratio",
        "Share of the last step in which ranks waited for data, the mean over ranks.",
        "steps.data_wait_ratio",
    ),
    step_gauge(
        "rayzero_bad_samples",
        "Samples that were left out since the job began, because they could not be made.",
        "bad_samples",
    ),
    counter(
        "rayzero_stream_samples_total",
        "Samples of a source in finished steps.",
        _of_sources(lambda values: values.totals["samples"]),
        "source",
    ),
    gauge(
        "rayzero_stream_share_ratio",
        "Share of a source in the samples of the last step.",
        _of_sources(lambda values: values.share),
        "source",
    ),
    counter(
        "rayzero_stream_read_bytes_total",
        "Size in memory of the blocks that were read, the sum over ranks.",
        _of_sources(lambda values: values.totals["bytes"]),
        "source",
    ),
    counter(
        "rayzero_stream_read_blocks_total",
        "Blocks that were read, the sum over ranks.",
        _of_sources(lambda values: values.totals["blocks"]),
        "source",
    ),
    counter(
        "rayzero_stream_block_uses_total",
        "How often a batch took rows of a block (of an iterable: a row) that was in memory (`hit`) "
        "or for which it waited (`wait`), the sum over ranks.",
        _block_uses,
        "source",
        "result",
    ),
)
