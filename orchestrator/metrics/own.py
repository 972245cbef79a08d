"""What the training function reports of its own, apart from what every job tells. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rayzero.orchestrator.progress import StepRecord

MOST = 100
"""Names of one job in /metrics: each is a series, and who makes one a step would fill a server."""

_OURS = frozenset(
    {
        *("step", "samples", "step_samples", "step_tokens", "tokens_per_s", "flops_per_s", "mfu"),
        *("lr", "grad_norm", "loss_scale", "skipped", "skipped_steps", "step_s", "exposed_comm_s"),
        *("checkpoint_s", "resident_bytes", "device_peak_bytes", "replica_step", "replica_bytes"),
    }
)
_OUR_FOLDERS = ("phases/", "bytes/", "collectives/")


def own_gauges(gauges: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Those that neither the engine nor a worker reports by itself."""
    for name, value in gauges.items():
        if name not in _OURS and not name.startswith(_OUR_FOLDERS):
            yield name, value


@dataclass
class Own:
    """Args:
    values: what was reported last under each name: not every step needs to report each.
    left_out: how many values had a name beyond the first `MOST`.
    """

    values: dict[str, float] = field(default_factory=dict)
    left_out: int = 0

    def add(self, record: StepRecord) -> None:
        for name, value in own_gauges(record.gauges):
            if name in self.values or len(self.values) < MOST:
                self.values[name] = value
            else:
                self.left_out += 1
