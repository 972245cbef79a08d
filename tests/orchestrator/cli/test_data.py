"""`rayzero data inspect`: counts, the samples of a step, errors."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import rayzero.data
from rayzero.engine.data.streams.sources import index
from rayzero.orchestrator.cli.app import app
from tests.engine.data.streams.memory import make_source, read_step


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of 100 rows in row groups of 30."""
    for number in range(3):
        rows = list(range(100 * number, 100 * number + 100))
        table = pa.table({"n": rows, "text": [f"row {row}" for row in rows]})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=30)
    return tmp_path


def inspect(*arguments: object, code: int = 0) -> str:
    """Runs the command; its stdout if it succeeds, all its output otherwise."""
    result = CliRunner().invoke(app, ["data", "inspect", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.stdout if code == 0 else result.output


def test_counts_are_those_of_pyarrow(folder: Path) -> None:
    value: dict[str, Any] = json.loads(inspect(folder, "--columns", "n", "--json"))
    files = [pq.ParquetFile(path) for path in sorted(folder.iterdir())]
    assert value["columns"] == {"n": "int64"}
    assert (value["blocks"], value["rows"], value["rows_of_a_block"]) == (12, 300, [10, 30])
    assert value["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    for file, listed in zip(files, value["files"], strict=True):
        counts = (file.metadata.num_row_groups, file.metadata.num_rows)
        assert (listed["blocks"], listed["rows"]) == counts
    lines = inspect(f"{folder}/*.parquet").splitlines()
    assert "3 files, 12 blocks of 10 to 30 rows, 300 rows" in lines[0]
    assert lines[1] == "columns: n (int64), text (string)"
    assert [line.split()[:2] for line in lines[3:]] == [["4", "100"]] * 3


def test_samples_of_a_step_are_those_that_a_loader_reads(folder: Path) -> None:
    where = (folder, "--step", 5, "--window", 3, "--batch", 8, "--seed", 7)
    value = json.loads(inspect(*where, "--json"))
    stream = rayzero.data.stream(rayzero.data.blocks(folder), shuffle_window=3)
    read = read_step(make_source(stream, 8, seed=7), 4 * 8, 8, 4, 2)
    assert [it["number"] for it in value["samples"]] == [it["n"] for it in read]
    for sample in value["samples"]:
        group = pq.ParquetFile(folder / f"{sample['block'] // 4}.parquet")
        rows = group.read_row_group(sample["block"] % 4).to_pylist()
        assert rows[sample["row"]]["n"] == sample["number"]
    lines = inspect(*where).splitlines()
    assert [int(line.split()[0]) for line in lines[-8:]] == [it["n"] for it in read]
    assert lines[-1].endswith(value["samples"][-1]["where"])


def test_errors_name_what_is_wrong(folder: Path) -> None:
    assert "no files at" in inspect(folder / "none", code=1)
    assert "--step is given without a batch size" in inspect(folder, "--step", 1, code=2)
    assert "less than or equal" in inspect(folder, "--step", 10**20, "--batch", 4, code=2)
    assert "no columns ['m']" in inspect(folder, "--columns", "n,m", code=1)
    assert "did you mean 'parquet'" in inspect(folder, "--format", "parket", code=2)
    (folder / "1.parquet").write_bytes(b"PAR1")
    assert "1.parquet is damaged" in inspect(folder, code=1)


def test_progress_of_a_long_scan_is_logged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is read before a line is logged."""
    logged = threading.Event()
    lines: list[str] = []
    read = index.read_checked

    def log(text: str, *values: object) -> None:
        lines.append(text % values)
        logged.set()

    def wait_and_read(*arguments: Any) -> Any:
        assert logged.wait(60)
        return read(*arguments)

    monkeypatch.setattr(index, "PROGRESS_S", 0.01)
    monkeypatch.setattr(index.log, "info", log)
    monkeypatch.setattr(index, "read_checked", wait_and_read)
    rayzero.data.blocks(folder)
    assert lines[0] == "indexing: 0 of 3 files are done, 0 MiB read"
