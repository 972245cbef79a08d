"""`deepspeed.monitor`: monitors that a script makes itself, of rank 0; the engine's are
`engine.monitor`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rayzero.deepspeed.comm import get_rank
from rayzero.engine.config.model import EngineConfig
from rayzero.engine.config.monitors import CsvMonitorConfig, MonitorConfig
from rayzero.engine.monitors import Event, make_monitors, to_points
from rayzero.engine.trackers import CsvFiles


class csvMonitor:  # noqa: N801 -- DeepSpeed's name
    """A CSV file for each value, in `output_path`/`job_name`."""

    def __init__(self, csv_config: CsvMonitorConfig) -> None:
        self.monitor_config = csv_config
        self.enabled = csv_config.enabled
        self.output_path = csv_config.output_path
        self.job_name = csv_config.job_name
        writes = self.enabled and get_rank() <= 0
        folder = Path(self.output_path) / self.job_name
        self._writer = CsvFiles(folder) if writes else None

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Writes `(name, value, samples)`."""
        if self._writer is not None:
            self._writer.write(to_points(event_list))


class MonitorMaster:
    """All monitors of a config."""

    def __init__(self, monitor_config: MonitorConfig) -> None:
        self.monitor_config = monitor_config
        self.enabled = monitor_config.enabled
        sections = {name: getattr(monitor_config, name) for name in MonitorConfig.model_fields}
        self._monitors = make_monitors(EngineConfig(**sections), {}, max(0, get_rank()))

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Writes `(name, value, samples)` to each of them."""
        self._monitors.write_events(event_list)
