"""The proof of the data order: which samples were consumed in which step, written as it happens.

A run writes into a folder of its own, one file a rank and generation. A step that is done again
after a fault has lines of several generations, of which the newest counts: the state went back to
before the older ones. Folders of several runs of a job may lie side by side under one: those whose
names sort later are newer.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayzero.engine.data.sampling import SampleOrder
from rayzero.engine.errors import DataError

_LEDGER_PATTERN = "generation-*.jsonl"


class SampleLedger:
    """One rank's lines in one generation.

    A line is one `write` to the file, so it outlives the process from the moment `write` returns.
    Call `write` before the state of its step can be restored from anywhere: then every step of the
    job's history has all its lines.

    Raises:
        DataError: the folder cannot be written, or this rank has written this generation already.
    """

    def __init__(self, folder: str | Path, generation: int, rank: int, world_size: int) -> None:
        self._rank_fields = {"generation": generation, "rank": rank, "world_size": world_size}
        self._path = Path(folder) / f"generation-{generation:05d}-rank-{rank:05d}.jsonl"
        self._samples: list[int] = []
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch(exist_ok=False)
        except OSError as error:
            raise self._write_error(error) from error

    def add_samples(self, samples: Sequence[int]) -> None:
        """Adds dataset indices to the step at hand."""
        self._samples.extend(samples)

    def write_step(self, step: int) -> None:
        """Ends a step, counted from 1, with the samples consumed since the one before.

        Raises:
            DataError: the line could not be written.
        """
        line = json.dumps({**self._rank_fields, "step": step, "samples": self._samples}) + "\n"
        data = line.encode()
        try:
            # Opened for each line: a generation may end at any time, and leaves nothing to close.
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                if os.write(file, data) < len(data):
                    raise OSError("only a part was written")
            finally:
                os.close(file)
        except OSError as error:
            raise self._write_error(error) from error
        self._samples = []

    def _write_error(self, error: OSError) -> DataError:
        return DataError(
            f"the ledger {self._path} cannot be written: {error.strerror or error}",
            "a new folder for each run, with room in it",
            "`ledger` or `checkpoint.path` in the job file",
        )


@dataclass(frozen=True)
class LedgerMismatch:
    """A step whose samples are not those of its positions.

    Attributes:
        missing: dataset indices that should have been consumed, and were not.
        extra: those that should not have been, or that were more often than they should.
    """

    step: int
    missing: tuple[int, ...]
    extra: tuple[int, ...]

    def __str__(self) -> str:
        parts = []
        for word, samples in (("missing", self.missing), ("extra", self.extra)):
            if samples:
                few = ", ".join(map(str, samples[:5])) + ", ..." * (len(samples) > 5)
                parts.append(f"{len(samples)} {word} ({few})")
        return f"step {self.step}: {' and '.join(parts)}"


def read_ledger(folder: str | Path) -> dict[int, list[int]]:
    """The samples of every step in the job's history, rank by rank.

    Raises:
        DataError: there is no ledger, or a line in it is damaged.
    """
    folder = Path(folder)
    # step -> (run, generation) -> rank -> samples
    found: defaultdict[int, dict[tuple[str, int], dict[int, list[int]]]] = defaultdict(dict)
    paths = sorted(folder.rglob(_LEDGER_PATTERN))
    if not paths:
        raise DataError(
            f"no ledger in {folder}", f"files {_LEDGER_PATTERN}", "`ledger: true` in the job file"
        )
    for path in paths:
        run = path.parent.relative_to(folder).as_posix()
        for line in _read_lines(path):
            ranks = found[line["step"]].setdefault((run, line["generation"]), {})
            ranks[line["rank"]] = line["samples"]
    newest = {step: turns[max(turns)] for step, turns in sorted(found.items())}
    return {
        step: [sample for rank in sorted(ranks) for sample in ranks[rank]]
        for step, ranks in newest.items()
    }


def check_ledger(
    folder: str | Path, order: SampleOrder, global_batch: int, steps: int | None = None
) -> list[LedgerMismatch]:
    """The steps that did not consume exactly the samples of their positions, each once.

    Args:
        steps: how many steps the job finished; None: as many as the ledger knows of.

    Raises:
        DataError: as `read`.
    """
    found = read_ledger(folder)
    last = max(found, default=0) if steps is None else steps
    return list(_find_mismatches(found, order, global_batch, last))


def _find_mismatches(
    found: Mapping[int, Sequence[int]], order: SampleOrder, global_batch: int, last: int
) -> Iterator[LedgerMismatch]:
    for step in range(1, last + 1):
        due = Counter(order.indices((step - 1) * global_batch, global_batch).tolist())
        seen = Counter(found.get(step, ()))
        if due != seen:
            missing, extra = due - seen, seen - due
            yield LedgerMismatch(
                step, tuple(sorted(missing.elements())), tuple(sorted(extra.elements()))
            )


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file. What follows the last newline was cut short by a SIGKILL."""
    *lines, _ = path.read_bytes().split(b"\n")
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
            counts = [line[key] for key in ("step", "generation", "rank")]
            whole = all(type(value) is int for value in [*counts, *line["samples"]])
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            raise DataError(
                f"line {number} of {path} is damaged: {text[:80]!r}",
                "a JSON object with generation, rank, world_size, step and samples",
            )
        yield line
