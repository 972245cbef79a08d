"""Panels about the training data, and the sources of streams."""

from __future__ import annotations

from tools.dashboard.panels import (
    JOB_SELECTOR,
    DashboardRow,
    Panel,
    Query,
    gauge_query,
    rate_query,
)

STREAMS_ROW = DashboardRow(
    "Streams",
    (
        Panel(
            "Waiting for data",
            "Share of the last step in which ranks waited for data, the mean over ranks.",
            "percentunit",
            (gauge_query("rayzero_data_wait_ratio", "waiting"),),
        ),
        Panel(
            "Samples of sources",
            "Samples a second of each source, in finished steps.",
            "none",
            (rate_query("rayzero_stream_samples_total", "{{source}}"),),
            stacked=True,
        ),
        Panel(
            "Shares of the mixture",
            "Share of each source in the samples of the last step.",
            "percentunit",
            (gauge_query("rayzero_stream_share_ratio", "{{source}}"),),
            stacked=True,
            maximum=1,
        ),
        Panel(
            "Bytes read",
            "Bytes in memory of the blocks that all ranks read, a second.",
            "binBps",
            (rate_query("rayzero_stream_read_bytes_total", "{{source}}"),),
        ),
        Panel(
            "Blocks read",
            "Blocks that all ranks read, a second.",
            "none",
            (rate_query("rayzero_stream_read_blocks_total", "{{source}}"),),
        ),
        Panel(
            "Blocks found in memory",
            "Share of the uses of a block for which a batch did not wait.",
            "percentunit",
            (
                Query(
                    "sum by (source) (rate(rayzero_stream_block_uses_total"
                    f'{{{JOB_SELECTOR},result="hit"}}[$__rate_interval]))'
                    " / sum by (source) (rate(rayzero_stream_block_uses_total"
                    f"{{{JOB_SELECTOR}}}[$__rate_interval]))",
                    "{{source}}",
                ),
            ),
            maximum=1,
        ),
    ),
)
