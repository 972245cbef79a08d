"""The tables of docs/architecture.md are those of the code, and links lead somewhere.

`python -m tests.house.test_docs` writes the tables anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rayzero.engine import memory
from rayzero.engine.zero.placement import STAGES
from rayzero.orchestrator.machine import EVENTS, Answer, Row, rows
from rayzero.orchestrator.states import State
from tests.house.source import ROOT

ARCHITECTURE = ROOT / "docs/architecture.md"
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]


def stage_table() -> str:
    heads = ("stage", "model weights", "main grads", "optimizer state, main weights")
    lines = [_row(*heads, "gradients move by", "weights move by"), _row(*["---"] * 6)]
    for stage in STAGES:
        places = (stage.model_weights, stage.main_grads, stage.optimizer_state)
        moves = (stage.gradient_collective, stage.weight_collective)
        lines.append(_row(str(stage.number), *(one.value for one in (*places, *moves))))
    return "\n".join(lines)


def bytes_table() -> str:
    """As it stands in the docstring of engine/memory.py."""
    return "\n".join(line for line in (memory.__doc__ or "").splitlines() if line.startswith("|"))


def state_table() -> str:
    lines = [_row("state", "event", "next state", "instructions, in order"), "|---|---|---|---|"]
    for state in State:
        answers = [(event.__name__, answer) for at, event, answer in rows() if at is state]
        for event, answer in answers:
            if isinstance(answer, Row):
                to = f"{answer.to}, new generation" if answer.opens else answer.to
                orders = ", ".join(order.__name__ for order in answer.orders)
                lines.append(_row(state, event, to, orders or "none"))
        ignored = [event for event, answer in answers if answer is Answer.IGNORED]
        if len(ignored) == len(EVENTS):
            ignored = ["every event"]
        if ignored:
            lines.append(_row(state, ", ".join(ignored), state, "ignored"))
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


TABLES: dict[str, Callable[[], str]] = {
    "stages": stage_table,
    "bytes": bytes_table,
    "states": state_table,
}


def with_tables(page: str) -> str:
    """The page with every table between its marks made anew."""
    for name, make in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end of table -->"
        parts = re.split(f"({begin}).*?({end})", page, flags=re.DOTALL)
        assert len(parts) == 4, f"docs/architecture.md has not one table marked {name!r}"
        page = parts[0] + begin + make() + "\n" + end + parts[3]
    return page


def test_the_tables_are_those_of_the_code() -> None:
    page = ARCHITECTURE.read_text(encoding="utf-8")
    assert page == with_tables(page), "python -m tests.house.test_docs writes them anew"


@pytest.mark.parametrize("cell", ["all_reduce", "4 + 12/W", "new generation"])
def test_a_table_that_differs_is_seen(cell: str) -> None:
    """One word changed in each table."""
    page = ARCHITECTURE.read_text(encoding="utf-8")
    place = page.index(cell, page.index("<!-- table:"))
    changed = page[:place] + "other" + page[place + len(cell) :]
    assert with_tables(changed) == page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_our_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    inside = [target for target in targets if "://" not in target]
    assert [target for target in inside if not (page.parent / target).exists()] == []


if __name__ == "__main__":
    text = ARCHITECTURE.read_text(encoding="utf-8")
    ARCHITECTURE.write_text(with_tables(text), encoding="utf-8")
