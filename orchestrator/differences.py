"""What differs between two specs of one job, key by key, and which of it matters when. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayzero.engine.masking import HIDDEN, is_secret, masked
from rayzero.orchestrator.spec import JobSpec

LIVE = ("workers.min", "workers.max")
"""What can be changed of a job while it runs."""
ADOPTABLE = (
    "workers",
    "steps",
    "checkpoint.every_steps",
    "checkpoint.keep",
    "checkpoint.keep_every",
    "checkpoint.notice_s",
    "checkpoint.lease_s",
    "checkpoint.resume",
    "recovery",
    "metrics",
    "faults",
    "ledger",
    "engine.zero_optimization",
    "engine.train_micro_batch_size_per_gpu",
    "engine.gradient_accumulation_steps",
    "engine.activation_checkpointing",
    "engine.wall_clock_breakdown",
    "engine.steps_per_print",
)
"""What may be another when a lost run is gone on with, with all below it: where, how fast and how
safely it is trained. All the rest says what is trained: the same run cannot go on with it."""


@dataclass(frozen=True)
class Difference:
    """One key. `ABSENT` stands for a key that one of the two has not. Its text tells no secret."""

    key: str
    old: str
    new: str

    def __str__(self) -> str:
        old, new = (self._told(one) for one in (self.old, self.new))
        return f"{self.key}: {old} -> {new}"

    def _told(self, value: str) -> str:
        secret = is_secret(self.key.rpartition(".")[2]) and value != ABSENT
        return HIDDEN if secret else masked(value)


ABSENT = "(none)"


def document(spec: JobSpec) -> dict[str, Any]:
    """A spec as plain data, with all defaults."""
    found: dict[str, Any] = spec.model_dump(mode="json")
    found["workers"]["max"] = spec.workers.most  # what `None` stands for
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Between two documents, by dotted key, sorted."""
    before, after = dict(_flat("", old)), dict(_flat("", new))
    return [
        Difference(key, before.get(key, ABSENT), after.get(key, ABSENT))
        for key in sorted(before.keys() | after.keys())
        if before.get(key, ABSENT) != after.get(key, ABSENT)
    ]


def beyond(found: Sequence[Difference], allowed: Sequence[str]) -> list[Difference]:
    """Those that are at none of the allowed keys, nor below one."""
    return [
        one
        for one in found
        if not any(one.key == key or one.key.startswith(key + ".") for key in allowed)
    ]


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Leaves by dotted key; an empty mapping is the same as none."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    elif value is not None:
        yield prefix, json.dumps(value, sort_keys=True, default=str)
