"""Records which samples each step consumed, and checks them against the data order.

A run writes into its own folder, one file for each rank and generation. A step that is recomputed
after a fault has lines of several generations; the newest generation counts, because the state was
reset to before the older lines. A folder may contain the folders of several runs of a job, whose
names sort by age.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rayzero.engine.errors import DataError
from rayzero.engine.trackers import append_all

_LEDGER_PATTERN = "generation-*.jsonl"


class Order(Protocol):
    """The order of a dataset, or of a stream."""

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """Returns the numbers of the samples at the positions `start` to `start + count - 1`."""
        ...


class SampleLedger:
    """One rank's lines of one generation.

    A line is a single `write` to the file, so it survives the process once `write_step` returned.
    Call `write_step` before the state of its step can be restored from anywhere: then every step of
    the job's history has all its lines. Raises DataError if the folder cannot be written, or this
    rank has already written this generation.
    """

    def __init__(self, folder: str | Path, generation: int, rank: int, world_size: int) -> None:
        self._rank_fields = {"generation": generation, "rank": rank, "world_size": world_size}
        self._path = Path(folder) / f"generation-{generation:05d}-rank-{rank:05d}.jsonl"
        self._samples: list[int] = []
        self._skipped: list[int] = []
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch(exist_ok=False)
        except OSError as error:
            raise self._write_error(error) from error

    def add_samples(self, samples: Sequence[int]) -> None:
        self._samples.extend(samples)

    def add_skipped(self, samples: Sequence[int]) -> None:
        """Adds those of the samples in `add_samples` that were bad, and left out."""
        self._skipped.extend(samples)

    def write_step(self, step: int) -> None:
        """Writes the line of a step, counted from 1: the samples consumed since the previous one.
        Raises DataError if the line could not be written."""
        fields = {**self._rank_fields, "step": step, "samples": self._samples}
        if self._skipped:
            fields["skipped"] = self._skipped
        line = json.dumps(fields) + "\n"
        try:
            # Opened for each line: a generation may end at any time, without closing anything.
            # Appends the whole line or nothing, because the line may be written again.
            append_all(self._path, line.encode(), create=False)
        except OSError as error:
            raise self._write_error(error) from error
        self._samples, self._skipped = [], []

    def _write_error(self, error: OSError) -> DataError:
        return DataError(
            f"the ledger {self._path} cannot be written: {error.strerror or error}",
            "a new folder for each run, writable and with free space",
            "`ledger` or `checkpoint.path` in the job file",
        )


@dataclass(frozen=True)
class LedgerMismatch:
    """A step that did not consume exactly the samples of its positions."""

    step: int
    missing: tuple[int, ...]  # dataset indices that were not consumed
    extra: tuple[int, ...]  # dataset indices that were consumed wrongly or too often

    def __str__(self) -> str:
        parts = []
        for word, samples in (("missing", self.missing), ("extra", self.extra)):
            if samples:
                few = ", ".join(map(str, samples[:5])) + ", ..." * (len(samples) > 5)
                parts.append(f"{len(samples)} {word} ({few})")
        return f"step {self.step}: {' and '.join(parts)}"


def read_ledger(folder: str | Path, *, skipped: bool = False) -> dict[int, list[int]]:
    """Returns the samples of every step in the job's history, rank by rank; with `skipped`, those
    of them that were bad, and left out. Raises DataError if there is no ledger, or a line in it is
    damaged."""
    folder = Path(folder)
    # step -> (run, generation) -> rank -> samples
    by_step: defaultdict[int, dict[tuple[str, int], dict[int, list[int]]]] = defaultdict(dict)
    paths = sorted(folder.rglob(_LEDGER_PATTERN))
    if not paths:
        raise DataError(
            f"no ledger in {folder}", f"files {_LEDGER_PATTERN}", "`ledger: true` in the job file"
        )
    for path in paths:
        run = path.parent.relative_to(folder).as_posix()
        for line in _read_lines(path):
            ranks = by_step[line["step"]].setdefault((run, line["generation"]), {})
            ranks[line["rank"]] = line.get("skipped", []) if skipped else line["samples"]
    newest = {step: attempts[max(attempts)] for step, attempts in sorted(by_step.items())}
    return {
        step: [sample for rank in sorted(ranks) for sample in ranks[rank]]
        for step, ranks in newest.items()
    }


def check_ledger(
    folder: str | Path, order: Order, global_batch: int, steps: int | None = None
) -> list[LedgerMismatch]:
    """Returns the steps that did not consume exactly the samples of their positions, each once.
    `steps` is the number of steps that the job finished; None: those in the ledger."""
    consumed = read_ledger(folder)
    last = max(consumed, default=0) if steps is None else steps
    mismatches = []
    for step in range(1, last + 1):
        expected = Counter(order.indices((step - 1) * global_batch, global_batch).tolist())
        actual = Counter(consumed.get(step, ()))
        if expected != actual:
            missing = tuple(sorted((expected - actual).elements()))
            extra = tuple(sorted((actual - expected).elements()))
            mismatches.append(LedgerMismatch(step, missing, extra))
    return mismatches


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the complete lines of a file; text after the last newline was cut by a SIGKILL."""
    *lines, _ = path.read_bytes().split(b"\n")
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
            counts = [line[key] for key in ("step", "generation", "rank")]
            samples = [*line["samples"], *line.get("skipped", ())]
            valid = all(type(value) is int for value in [*counts, *samples])
        except (ValueError, KeyError, TypeError):
            valid = False
        if not valid:
            raise DataError(
                f"line {number} of {path} is damaged: {text[:80]!r}",
                "a JSON object with generation, rank, world_size, step and samples",
            )
        yield line
