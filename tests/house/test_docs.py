"""Generated tables of the documentation are up to date, and links between pages are valid.

`python -m tests.house.test_docs` updates the tables.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
from pydantic import BaseModel

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
from rayzero.orchestrator.spec_sections import MetricsSpec
from rayzero.workers.chaos.spec import FAULT_KINDS, fault_usage
from rayzero.workers.nccl_settings import NCCL_SETTINGS
from tests.house.source import PAGES, ROOT, packages


def stage_table() -> str:
    headings = ("stage", "model weights", "main grads", "optimizer state, main weights")
    lines = [_row(*headings, "gradients move by", "weights move by"), _row(*["---"] * 6)]
    for stage in STAGES:
        places = (stage.model_weights, stage.main_grads, stage.optimizer_state)
        moves = (stage.gradient_collective, stage.weight_collective)
        lines.append(_row(str(stage.number), *(item.value for item in (*places, *moves))))
    return "\n".join(lines)


def bytes_table() -> str:
    """The table in the docstring of engine/accounting.py."""
    return "\n".join(
        line for line in (accounting.__doc__ or "").splitlines() if line.startswith("|")
    )


def state_table() -> str:
    lines = [_row("state", "event", "next state", "instructions, in order"), "|---|---|---|---|"]
    for state in State:
        ignored = []
        for event in EVENTS:
            transition = TABLE.get((state, event))
            if transition == (state, ()):
                ignored.append(event.__name__)
            elif transition is not None:
                instructions = ", ".join(transition.instructions) or "none"
                lines.append(_row(state, event.__name__, transition.next_state, instructions))
        if len(ignored) == len(EVENTS):
            ignored = ["every event"]
        if ignored:
            lines.append(_row(state, ", ".join(ignored), state, "ignored"))
    return "\n".join(lines)


def settings_table(section: type[BaseModel], prefix: str) -> str:
    """The settings of a section of the job file, from its model."""
    lines = [_row("setting", "default", "what it is"), "|---|---|---|"]
    for key, field in section.model_fields.items():
        default = "none" if field.default is None else field.default
        lines.append(_row(f"`{prefix}.{key}`", f"`{default}`", str(field.description)))
    return "\n".join(lines)


def fault_table() -> str:
    """Every fault with its arguments and their defaults."""
    lines = [_row("fault", "what happens", "where"), "|---|---|---|"]
    for name, kind in FAULT_KINDS.items():
        lines.append(_row(f"`{fault_usage(name)}`", kind.description, kind.target))
    return "\n".join(lines)


def nccl_table() -> str:
    """The environment variables that a worker sets."""
    lines = [_row("variable", "value", "what follows from another value"), "|---|---|---|"]
    for setting in NCCL_SETTINGS:
        value = f"`{setting.value}`{', required' * setting.required}"
        lines.append(_row(f"`{setting.name}`", value, setting.otherwise))
    return "\n".join(lines)


def key_table() -> str:
    """Every key of an engine config, by group."""
    lines = [_row("key", "status", "what it asks for, and why not"), "|---|---|---|"]
    for group, keys in KEY_GROUPS.items():
        lines.append(_row(f"**{group}**", "", ""))
        for key in keys:
            use = f"; use {key.alternative}" if key.alternative and key.status is REFUSED else ""
            why = f". {key.reason[:1].upper()}{key.reason[1:]}{use}" if key.reason else ""
            lines.append(_row(f"`{key.path}`", key.status, f"{key.description}{why}"))
    return "\n".join(lines)


def series_table() -> str:
    """Every series of /metrics, by group."""
    lines = [_row("series", "type", "labels", "unit", "what it is"), "|---|---|---|---|---|"]
    for group, members in SERIES.items():
        lines.append(_row(f"**{group}**", "", "", "", ""))
        for series in members:
            labels = ", ".join(f"`{label}`" for label in series.labels)
            lines.append(_row(f"`{series.name}`", series.kind, labels, series.unit, series.help))
    return "\n".join(lines)


def auto_table() -> str:
    lines = [_row("key", '"auto" becomes', "why"), "|---|---|---|"]
    for path, rule in AUTO_RULES.items():
        value = rule.copied_from or rule.value
        became = "left out" if value is None else f"`{json.dumps(value)}`".replace('"', "")
        lines.append(_row(f"`{path}`", became, rule.reason.removeprefix("left out: ")))
    lines.append(_row(f"`{TOTAL_STEPS_PATH}`", "`steps` of the job file", "refused outside a job"))
    return "\n".join(lines)


def old_name_table() -> str:
    lines = [_row("old", "is now", "value"), "|---|---|---|"]
    for name in OLD_NAMES:
        value = f'`true` is `"{name.true}"`' if name.true else "the same"
        lines.append(_row(f"`{name.old}`", f"`{name.new}`", value))
    return "\n".join(lines)


def shorthand_table() -> str:
    lines = [_row("section", "`true`", "`false`"), "|---|---|---|"]
    lines += [
        _row(f"`{path}`", *(f"`{json.dumps(meaning)}`" for meaning in meanings))
        for path, meanings in SHORTHANDS.items()
    ]
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


TABLES: Mapping[Path, Mapping[str, Callable[[], str]]] = {
    ROOT / "docs/engine.md": {"stages": stage_table, "bytes": bytes_table},
    ROOT / "docs/control-plane.md": {"states": state_table},
    ROOT / "docs/faults.md": {
        "workers": partial(settings_table, Workers, "workers"),
        "recovery": partial(settings_table, RecoverySpec, "recovery"),
        "faults": fault_table,
        "nccl": nccl_table,
    },
    ROOT / "docs/config.md": {
        "shorts": shorthand_table,
        "autos": auto_table,
        "old names": old_name_table,
        "keys": key_table,
    },
    ROOT / "docs/metrics.md": {
        "metrics": partial(settings_table, MetricsSpec, "metrics"),
        "series": series_table,
    },
    ROOT / "docs/checkpoints.md": {
        "checkpoint": partial(settings_table, CheckpointSpec, "checkpoint"),
    },
}
WITH_TABLES = pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)


def update_tables(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page with every table between its markers regenerated."""
    for name, make in tables.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end of table -->"
        parts = re.split(f"({begin}).*?({end})", page, flags=re.DOTALL)
        assert len(parts) == 4, f"the page must have exactly one table marked {name!r}"
        page = parts[0] + begin + make() + "\n" + end + parts[3]
    return page


@WITH_TABLES
def test_tables_are_up_to_date(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    hint = "run python -m tests.house.test_docs to update them"
    assert page == update_tables(page, TABLES[path]), hint


@WITH_TABLES
def test_outdated_table_is_detected(path: Path) -> None:
    """With a change in the last cell of each table."""
    page = path.read_text(encoding="utf-8")
    for name in TABLES[path]:
        position = page.index(" |\n<!-- end of table -->", page.index(f"<!-- table: {name} -->"))
        changed = page[:position] + "other" + page[position:]
        assert update_tables(changed, TABLES[path]) == page


# They name GPUs only as resources that Ray schedules, or say that there is none.
WITHOUT_GPU_STATEMENTS = {"docs/jobs.md", "docs/quickstart.md", "docs/limits.md"}


def test_pages_that_speak_of_gpus_link_to_the_evidence() -> None:
    """Whether it was measured on one: `docs/limits.md` says so for every statement."""
    pages = {
        str(page.relative_to(ROOT)): page.read_text()
        for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    }
    speaking = {name for name, text in pages.items() if re.search(r"\b(GPUs?|NCCL)\b", text)}
    silent = {name for name in speaking if "limits.md#gpus" not in pages[name]}
    assert silent == WITHOUT_GPU_STATEMENTS
    assert "\n## GPUs\n" in pages["docs/limits.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_files_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


NOT_THIS_PROJECTS = {"first.py", "train.py"}
"""Files that pages have the reader write."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_files_that_pages_name_exist(page: Path) -> None:
    named = set(re.findall(r"`([\w./-]+\.py)`", page.read_text(encoding="utf-8")))
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    known = {f"/rayzero/{file}" for file in files.stdout.splitlines()}
    unknown = {name for name in named if not any(file.endswith(f"/{name}") for file in known)}
    assert unknown - NOT_THIS_PROJECTS == set()


if __name__ == "__main__":
    for path, tables in TABLES.items():
        text = path.read_text(encoding="utf-8")
        path.write_text(update_tables(text, tables), encoding="utf-8")


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
