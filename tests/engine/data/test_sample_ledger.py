"""Sample ledger: checks, damaged files, durability."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayzero.engine.data.sample_ledger import (
    LedgerMismatch,
    SampleLedger,
    check_ledger,
    read_ledger,
)
from rayzero.engine.data.sampling import SampleOrder, assign_step
from rayzero.engine.errors import DataError

ORDER = SampleOrder(20, 3)


def write(folder: Path, generation: int, world_size: int, steps: range, batch: int = 6) -> None:
    """Write the ledgers of all ranks of a generation."""
    for rank in range(world_size):
        ledger = SampleLedger(folder, generation, rank, world_size)
        for step in steps:
            for part in assign_step(batch, world_size, rank, 2):
                start = (step - 1) * batch + part.start
                ledger.add_samples(ORDER.indices(start, part.count).tolist())
            ledger.write_step(step)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 3)), max_size=5))
def test_repeated_steps_count_once(
    tmp_path_factory: pytest.TempPathFactory, generations: list[tuple[int, int, int]]
) -> None:
    """A generation is (world size, number of steps, number of repeated steps)."""
    folder, last = tmp_path_factory.mktemp("ledger"), 1
    write(folder, 0, 1, range(1, 2))
    for number, (world_size, steps, repeated) in enumerate(generations, start=1):
        first = max(1, last + 1 - repeated)
        write(folder, number, world_size, range(first, first + steps))
        last = first + steps - 1
    assert check_ledger(folder, ORDER, 6, steps=last) == []


def test_incomplete_generations_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, range(1, 4))
    (tmp_path / "generation-00001-rank-00001.jsonl").unlink()  # exited before it wrote
    assert [problem.step for problem in check_ledger(tmp_path, ORDER, 6)] == [1, 2, 3]
    write(tmp_path, 2, 3, range(1, 4))
    assert check_ledger(tmp_path, ORDER, 6) == []


def test_later_run_takes_precedence(tmp_path: Path) -> None:
    write(tmp_path / "run-1", 1, 2, range(1, 4))
    write(tmp_path / "run-1", 7, 2, range(4, 6))
    (tmp_path / "run-1" / "generation-00007-rank-00001.jsonl").unlink()
    write(tmp_path / "run-2", 1, 3, range(4, 6))
    assert check_ledger(tmp_path, ORDER, 6) == []


def test_mismatches_list_missing_and_extra_samples(tmp_path: Path) -> None:
    first, second = ORDER.indices(0, 4).tolist(), ORDER.indices(4, 4).tolist()
    ledger = SampleLedger(tmp_path, 1, 0, 1)
    ledger.add_samples(first[:3])
    ledger.add_samples(first[:1])
    ledger.write_step(1)
    ledger.add_samples(second)
    ledger.write_step(3)
    assert check_ledger(tmp_path, ORDER, 4, steps=2) == [
        LedgerMismatch(1, (first[3],), (first[0],)),
        LedgerMismatch(2, tuple(sorted(second)), ()),
    ]
    texts = [str(problem) for problem in check_ledger(tmp_path, ORDER, 4)]
    assert texts[0] == f"step 1: 1 missing ({first[3]}) and 1 extra ({first[0]})"
    assert texts[1].startswith("step 2: 4 missing (")
    assert len(texts) == 3


def test_lines_survive_sigkill(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from rayzero.engine.data.sample_ledger import SampleLedger\n"
        "ledger = SampleLedger(sys.argv[1], 1, 0, 1)\n"
        "ledger.add_samples(range(100_000))\n"
        "ledger.write_step(1)\n"
        "ledger.add_samples([1])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.run([sys.executable, "-c", script, tmp_path], check=False, timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert read_ledger(tmp_path) == {1: list(range(100_000))}


def test_truncated_last_line_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, 1, 1, range(1, 3))
    (path,) = tmp_path.iterdir()
    os.truncate(path, path.stat().st_size - 5)
    assert list(read_ledger(tmp_path)) == [1]


@pytest.mark.parametrize("line", ["{", "[]", '{"step": 1}', '{"step": 1, "samples": ["x"]}', ""])
def test_error_names_damaged_line(tmp_path: Path, line: str) -> None:
    write(tmp_path, 1, 1, range(1, 3))
    (path,) = tmp_path.iterdir()
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(DataError, match=f"line 3 of {path}"):
        read_ledger(tmp_path)


def test_line_format(tmp_path: Path) -> None:
    write(tmp_path, 4, 1, range(9, 10))
    (path,) = tmp_path.iterdir()
    line = json.loads(path.read_text())
    samples = line.pop("samples")
    assert line == {"generation": 4, "rank": 0, "world_size": 1, "step": 9}
    assert samples == ORDER.indices(48, 6).tolist()


def test_missing_existing_and_unwritable_ledgers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no ledger in"):
        read_ledger(tmp_path)
    SampleLedger(tmp_path, 1, 0, 1)
    with pytest.raises(DataError, match="File exists") as caught:
        SampleLedger(tmp_path, 1, 0, 1)
    assert "new folder" in caught.value.allowed
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        SampleLedger(tmp_path / "file", 1, 0, 1)


def test_full_disk_is_an_error_and_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = SampleLedger(tmp_path, 1, 0, 1)
    (path,) = tmp_path.iterdir()
    open_path = Path.open

    def open_on_full_disk(self: Path, mode: str) -> None:
        with open_path(self, mode) as file:
            file.write(b"half of a line")
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(Path, "open", open_on_full_disk)
    with pytest.raises(DataError, match="No space left"):
        ledger.write_step(1)
    assert not path.stat().st_size
