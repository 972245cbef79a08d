"""The table of journeys in docs/architecture.md: how many files a change touches."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from tests.house.source import ROOT, import_graph, packages

# The maximum number of files of each journey, by its first words.
LIMITS = {
    "a worker dies": 25,
    "a gradient is reduced": 10,
    "a checkpoint is committed": 14,
    "a config key is added": 3,
    "a metric is added": 3,
    "an optimizer is added": 3,
    "a codec is added": 3,
}
PROTOCOLS = ("rayzero.engine.comm.backend",)
"""Modules that connect callers and implementations which do not import each other."""


def journeys() -> dict[str, tuple[int, list[str]]]:
    """The stated number of files and the files of each row."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = page.split("<!-- journeys -->")[1].split("<!-- end of journeys -->")[0]
    rows = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    return {name: (int(count), re.findall(r"`([^`]+)`", files)) for name, count, files in rows}


def connected(files: list[str], graph: dict[str, set[str]]) -> set[str]:
    """The files of a journey that import another one, are imported by one, or share a protocol."""
    names = {f"rayzero.{file.removesuffix('.py').replace('/', '.')}": file for file in files}
    edges = {(name, target) for name in names for target in graph.get(name, set()) & names.keys()}
    for protocol in PROTOCOLS:
        users = sorted(name for name in names if protocol in graph.get(name, set()))
        edges |= set(pairwise(users))
    return {names[name] for edge in edges for name in edge}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return import_graph(packages())


@pytest.mark.parametrize("start", LIMITS)
def test_journey_matches_table(start: str, graph: dict[str, set[str]]) -> None:
    count, files = next(row for name, row in journeys().items() if name.startswith(start))
    assert len(files) == len(set(files)) == count <= LIMITS[start]
    assert [file for file in files if not (ROOT / file).is_file()] == []
    if not start.endswith("added"):
        assert set(files) - connected(files, graph) == set()


def test_every_journey_has_limit() -> None:
    assert len(journeys()) == len(LIMITS)


def test_unconnected_file_is_detected(graph: dict[str, set[str]]) -> None:
    assert connected(["engine/errors.py", "orchestrator/machine.py"], graph) == {
        "engine/errors.py",
        "orchestrator/machine.py",
    }
    assert connected(["engine/layout/reshard.py", "orchestrator/machine.py"], graph) == set()
