"""What of the chart follows from the code: its version, the job file's schema, its README.

`python -m tests.house.test_chart` writes the last two anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import reduce
from typing import Any

import yaml

from rayzero.orchestrator.spec import JobSpec
from tests.house.source import ROOT

CHART = ROOT / "helm/rayzero"
SCHEMA, README = CHART / "values.schema.json", CHART / "README.md"
MARKS = ("<!-- table: values -->\n", "<!-- end of table -->")
AGAIN = "python -m tests.house.test_chart writes it anew"


def pinned(package: str) -> str:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    found = re.search(rf"^{package}==(\S+)$", text, re.MULTILINE)
    assert found is not None
    return found[1]


def with_job(schema: dict[str, Any]) -> dict[str, Any]:
    """The values' schema with the job file's in it."""
    job = JobSpec.model_json_schema()
    sections = job.pop("$defs")
    return schema | {"$defs": schema["$defs"] | sections | {"JobSpec": job}}


def with_values(page: str) -> str:
    """The README with its table of values made anew."""
    begin, rest = page.split(MARKS[0])
    _, end = rest.split(MARKS[1])
    lines = ["| value | default | what it is |", "|---|---|---|", *values_rows()]
    return begin + MARKS[0] + "\n".join(lines) + "\n" + MARKS[1] + end


def values_rows() -> Iterator[str]:
    """A row for each value that values.yaml describes in a comment that begins with `# --`."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    lines = text.splitlines()
    values = yaml.safe_load(text)
    for path, line in _places("", yaml.compose(text, yaml.SafeLoader)):
        value = reduce(lambda inner, key: inner[key], path.split("."), values)
        above = [lines[line - 1].strip()]
        if above[0].startswith("# @default --"):
            above.insert(0, lines[line - 2].strip())
        if above[0].startswith("# --"):
            default = above[1].removeprefix("# @default --").strip() if len(above) > 1 else ""
            shown = default or f"`{json.dumps(value)}`"
            yield f"| `{path}` | {shown} | {above[0].removeprefix('# --').strip()} |"


def described() -> set[str]:
    return {row.split("`")[1] for row in values_rows()}


def _places(prefix: str, node: yaml.MappingNode) -> Iterator[tuple[str, int]]:
    """Dotted path and line of every key, inner ones too, but those on the same line; keys with dots
    of their own left out."""
    for key, value in node.value:
        if "." not in key.value:
            path = f"{prefix}{key.value}"
            yield path, key.start_mark.line
            if isinstance(value, yaml.MappingNode) and not value.flow_style:
                yield from _places(f"{path}.", value)


def undescribed(node: yaml.MappingNode) -> list[str]:
    """Values that neither have a description nor lie in a value, or around values, that has one."""
    told, paths = described(), [path for path, _ in _places("", node)]

    def known(path: str) -> bool:
        above = path.split(".")
        inside = any(".".join(above[:count]) in told for count in range(1, len(above) + 1))
        return inside or any(other.startswith(f"{path}.") for other in told)

    return [path for path in paths if not known(path)]


def test_it_has_our_versions() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert f'version = "{chart["appVersion"]}"' in project
    assert values["rayVersion"] == pinned("ray")


def test_its_schema_knows_our_job_file() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    assert schema == with_job(schema), AGAIN


def test_its_readme_lists_its_values() -> None:
    page = README.read_text(encoding="utf-8")
    assert page == with_values(page), AGAIN


def test_every_value_is_described() -> None:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    assert undescribed(yaml.compose(text, yaml.SafeLoader)) == []
    more = yaml.compose(f"{text}\nundescribed: 1", yaml.SafeLoader)
    assert undescribed(more) == ["undescribed"]


if __name__ == "__main__":
    new = with_job(json.loads(SCHEMA.read_text(encoding="utf-8")))
    SCHEMA.write_text(json.dumps(new, indent=2) + "\n", encoding="utf-8")
    README.write_text(with_values(README.read_text(encoding="utf-8")), encoding="utf-8")
