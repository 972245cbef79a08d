"""Tables of the documentation fit the code: those that are generated, journeys, and ordering rules.

`python -m tests.house.test_docs` updates the tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rayzero.engine import accounting
from rayzero.engine.config.keys import REFUSED
from rayzero.engine.config.model import KEY_GROUPS
from rayzero.engine.config.normalize import (
    AUTO_RULES,
    OLD_NAMES,
    SHORTHANDS,
    TOTAL_STEPS_PATH,
)
from rayzero.engine.zero.placement import STAGES
from rayzero.orchestrator.machine import EVENTS, TABLE, State
from rayzero.orchestrator.metrics.catalog import CATALOG_GROUPS as SERIES
from rayzero.orchestrator.spec import CheckpointSpec, RecoverySpec, Workers
from rayzero.orchestrator.spec_sections import HealthSpec, MetricsSpec, RecordsSpec
from rayzero.workers.chaos.spec import all_fault_kinds, fault_usage
from rayzero.workers.nccl_settings import NCCL_SETTINGS
from tests.house.source import ROOT, packages

DOCS = ROOT / "docs"


def table(headings: str, rows: Iterable[Sequence[object]]) -> str:
    """A table; `headings` are separated by bars."""
    names = headings.split("|")
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (names, *rows)]
    lines.insert(1, "|" + "---|" * len(names))
    return "\n".join(lines)


def stage_table() -> str:
    return table(
        "stage|model weights|main grads|optimizer state, main weights|gradients move by|"
        "weights move by",
        (
            (
                stage.number,
                *(stage.model_weights.value, stage.main_grads.value, stage.optimizer_state.value),
                *(stage.gradient_collective.value, stage.weight_collective.value),
            )
            for stage in STAGES
        ),
    )


def bytes_table() -> str:
    """The table in the docstring of engine/accounting.py."""
    return "\n".join(
        line for line in (accounting.__doc__ or "").splitlines() if line.startswith("|")
    )


def state_rows() -> Iterator[tuple[str, ...]]:
    for state in State:
        ignored = []
        for event in EVENTS:
            transition = TABLE.get((state, event))
            if transition == (state, ()):
                ignored.append(event.__name__)
            elif transition is not None:
                instructions = ", ".join(transition.instructions) or "none"
                yield state, event.__name__, transition.next_state, instructions
        if len(ignored) == len(EVENTS):
            ignored = ["every event"]
        if ignored:
            yield state, ", ".join(ignored), state, "ignored"


def settings_table(section: type[BaseModel], prefix: str) -> str:
    """The settings of a section of the job file, from its model."""
    return table(
        "setting|default|what it is",
        (
            (
                f"`{prefix}.{key}`",
                f"`{_shown_default(field)}`",
                field.description,
            )
            for key, field in section.model_fields.items()
        ),
    )


def _shown_default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    return "none" if default is None else str(default)


def key_rows() -> Iterator[tuple[str, ...]]:
    """Every key of an engine config, by group."""
    for group, keys in KEY_GROUPS.items():
        yield f"**{group}**", "", ""
        for key in keys:
            use = f"; use {key.alternative}" if key.alternative and key.status is REFUSED else ""
            why = f". {key.reason[:1].upper()}{key.reason[1:]}{use}" if key.reason else ""
            yield f"`{key.path}`", key.status, f"{key.description}{why}"


def series_rows() -> Iterator[tuple[str, ...]]:
    """Every series of /metrics, by group."""
    for group, members in SERIES.items():
        yield f"**{group}**", "", "", "", ""
        for series in members:
            labels = ", ".join(f"`{label}`" for label in series.labels)
            yield f"`{series.name}`", series.kind, labels, series.unit, series.help


def auto_rows() -> Iterator[tuple[str, ...]]:
    for path, rule in AUTO_RULES.items():
        value = rule.copied_from or rule.value
        became = "left out" if value is None else f"`{json.dumps(value)}`".replace('"', "")
        yield f"`{path}`", became, rule.reason.removeprefix("left out: ")
    yield f"`{TOTAL_STEPS_PATH}`", "`steps` of the job file", "refused outside a job"


FAULT_ROWS = [
    (f"`{fault_usage(name, of_role=kind.of_role)}`", kind.description, kind.target)
    for name, kind in all_fault_kinds()
]
NCCL_ROWS = [
    (f"`{it.name}`", f"`{it.value}`{', required' * it.required}", it.otherwise)
    for it in NCCL_SETTINGS
]
OLD_NAME_ROWS = [
    (f"`{it.old}`", f"`{it.new}`", f'`true` is `"{it.true}"`' if it.true else "the same")
    for it in OLD_NAMES
]
SHORTHAND_ROWS = [
    (f"`{path}`", *(f"`{json.dumps(meaning)}`" for meaning in meanings))
    for path, meanings in SHORTHANDS.items()
]


TABLES: Mapping[str, Mapping[str, str]] = {
    "engine.md": {"stages": stage_table(), "bytes": bytes_table()},
    "control-plane.md": {
        "states": table("state|event|next state|instructions, in order", state_rows())
    },
    "faults.md": {
        "workers": settings_table(Workers, "workers"),
        "recovery": settings_table(RecoverySpec, "recovery"),
        "health": settings_table(HealthSpec, "health"),
        "faults": table("fault|what happens|where", FAULT_ROWS),
        "nccl": table("variable|value|what follows from another value", NCCL_ROWS),
    },
    "config.md": {
        "shorts": table("section|`true`|`false`", SHORTHAND_ROWS),
        "autos": table('key|"auto" becomes|why', auto_rows()),
        "old names": table("old|is now|value", OLD_NAME_ROWS),
        "keys": table("key|status|what it asks for, and why not", key_rows()),
    },
    "metrics.md": {
        "metrics": settings_table(MetricsSpec, "metrics"),
        "series": table("series|type|labels|unit|what it is", series_rows()),
    },
    "checkpoints.md": {
        "checkpoint": settings_table(CheckpointSpec, "checkpoint"),
        "records": settings_table(RecordsSpec, "records"),
    },
}
"""{page: {name between the markers: the table}}."""


def update_tables(path: Path) -> str:
    """The page with every table between its markers regenerated."""
    page = path.read_text(encoding="utf-8")
    for name, text in TABLES[path.name].items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end of table -->"
        parts = re.split(f"({begin}).*?({end})", page, flags=re.DOTALL)
        assert len(parts) == 4, f"the page must have exactly one table marked {name!r}"
        page = f"{parts[0]}{begin}{text}\n{end}{parts[3]}"
    return page


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_up_to_date(name: str) -> None:
    hint = "run python -m tests.house.test_docs to update them"
    assert (DOCS / name).read_text(encoding="utf-8") == update_tables(DOCS / name), hint


RULE = re.compile(r"^- `([a-z0-9-]+)` (?:.|\n  )*?\(`([\w/]+\.py)`;\s", re.MULTILINE)
RULES_OF_MODULE = re.compile(r"Rules? of ordering: ((?:`[a-z0-9-]+`,?\s)+)\(docs/engine\.md\)")


def test_rules_of_ordering_are_named_in_their_modules() -> None:
    page = (ROOT / "docs/engine.md").read_text(encoding="utf-8")
    stated = {(file, rule) for rule, file in RULE.findall(page)}
    found = set()
    for module in packages():
        file = module.name.removeprefix("rayzero.").replace(".", "/") + ".py"
        for rules in RULES_OF_MODULE.findall(module.text):
            names = re.findall(r"`([a-z0-9-]+)`", rules)
            found |= {(file.removeprefix("engine/"), name) for name in names}
    assert len(stated) == page.count("\n- `", page.index("## Ordering and lifetime rules"))
    assert found == stated


JOURNEY_LIMITS = {
    "a worker dies": 25,
    "a gradient is reduced": 10,
    "a checkpoint is committed": 14,
    "a config key is added": 3,
    "a metric is added": 3,
    "an optimizer is added": 3,
    "a codec is added": 3,
}


def test_journeys_touch_few_files() -> None:
    """The table in docs/architecture.md: the number of files, which are there."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = page.split("<!-- journeys -->")[1].split("<!-- end of journeys -->")[0]
    rows = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    assert len(rows) == len(JOURNEY_LIMITS)
    for (name, count, text), (start, limit) in zip(rows, JOURNEY_LIMITS.items(), strict=True):
        files = re.findall(r"`([^`]+)`", text)
        assert name.startswith(start)
        assert len(set(files)) == int(count) <= limit
        assert [file for file in files if not (ROOT / file).is_file()] == []


if __name__ == "__main__":
    for name in TABLES:
        (DOCS / name).write_text(update_tables(DOCS / name), encoding="utf-8")
