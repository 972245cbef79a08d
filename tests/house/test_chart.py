"""Parts of the chart that derive from the code: versions, the schemas of the job file and of the
engine config, the README.

`python -m tests.house.test_chart` updates the schema and the README.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from ray.runtime_env import RuntimeEnv

from rayzero.engine.config.checks import DEFAULTS, is_in_force
from rayzero.engine.config.explain import json_schema
from rayzero.engine.config.keys import REFUSED
from rayzero.engine.config.model import KEYS
from rayzero.engine.config.normalize import get_path
from rayzero.orchestrator.spec import JobSpec
from tests.deploy.schemas import KUBERNETES
from tests.house.source import ROOT

CHART = ROOT / "helm/rayzero"
SCHEMA, README = CHART / "values.schema.json", CHART / "README.md"
REFUSED_KEYS = CHART / "files/refused.json"
# How the chart tells that a value of a refused key requests something, by `Key.active`. What has no
# name here is left to the job's start.
ACTIVE = {"": "set", "enabled": "enabled", "present": "present"}
MARKERS = ("<!-- table: values -->\n", "<!-- end of table -->")
HINT = "run python -m tests.house.test_chart to update it"


def pinned_version(package: str) -> str:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pin = re.search(rf"^{package}==(\S+)$", text, re.MULTILINE)
    assert pin is not None
    return pin[1]


def update_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The values' schema with the current schemas of the job file and of the engine config."""
    job = JobSpec.model_json_schema()
    sections = job.pop("$defs")
    engine = json_schema()
    del engine["$schema"]
    reference = {"$ref": "#/$defs/EngineConfig"}
    inline = {"if": {"type": "object"}, "then": reference, "else": {"type": ["string", "null"]}}
    job["properties"]["engine"] = inline
    schema["properties"]["job"]["properties"]["engine"] = reference
    schema["properties"]["job"]["properties"]["runtimeEnv"] = _object(
        {name.lstrip("_"): {} for name in sorted(RuntimeEnv.known_fields)}
    )
    sections |= {"JobSpec": job, "EngineConfig": engine}
    sections = {name: _by_type(section) for name, section in sections.items()} | pod_schema()
    return _closed(schema | {"$defs": schema["$defs"] | sections})


def pod_schema() -> dict[str, Any]:
    """Definitions of PodTemplate and of what it refers to, by Kubernetes' newest schema.

    As a part of a pod it has no required containers, and null removes a key of the chart's.
    """
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    (path,) = folder.glob(f"v{KUBERNETES[-1]}.*-strict/_definitions.json")
    known = json.loads(path.read_text(encoding="utf-8"))["$defs"]
    out: dict[str, Any] = {}
    missing = ["io.k8s.api.core.v1.PodSpec"]
    while missing:
        name = missing.pop()
        if _short(name) not in out:
            out[_short(name)] = _without_texts(known[name])
            text = json.dumps(known[name])
            missing += re.findall(r'#/\$defs/([^"]+)"', text)
    for required in ("containers", "image", "serviceName"):
        for definition in out.values():
            if required in definition.get("required", ()):
                definition["required"].remove(required)
    metadata = {"labels": {"$ref": "#/$defs/labels"}, "annotations": {"$ref": "#/$defs/strings"}}
    spec = {"$ref": f"#/$defs/{_short('io.k8s.api.core.v1.PodSpec')}"}
    return out | {"PodTemplate": _object({"metadata": _object(metadata), "spec": spec})}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _short(name: str) -> str:
    return f"k8s.{name.rsplit('.', 1)[-1]}"


def _without_texts(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_texts(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    if isinstance(reference := node.get("$ref"), str):
        target = {"$ref": f"#/$defs/{_short(reference.rsplit('/', 1)[-1])}"}
        return {"if": {"not": {"type": "null"}}, "then": target}
    dropped = ("description", "format", "default", "title")
    return {
        key: _without_texts(value)
        for key, value in node.items()
        if not key.startswith("x-kubernetes-") and not (key in dropped and isinstance(value, str))
    }


def _by_type(node: Any) -> Any:
    """`anyOf` in terms of the value's type: of `anyOf`, Helm would report every alternative."""
    if isinstance(node, list):
        return [_by_type(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    if "anyOf" in node:
        options = [_by_type(option) for option in _alternatives(node)]
        node = {key: value for key, value in node.items() if key != "anyOf"}
        return _by_type(node) | _merge(options)
    return {key: _by_type(inner) for key, inner in node.items()}


def _alternatives(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for option in node["anyOf"]:
        yield from _alternatives(option) if "anyOf" in option else (option,)


def _merge(options: list[dict[str, Any]]) -> dict[str, Any]:
    """One schema for options of different types. All keywords but `enum` and `$ref` are of one type
    only; a `pattern` has to allow the constants beside it."""
    if {} in options:
        return {}
    allowed: dict[str, list[Any]] = {}
    conditions, rest = [], {}
    for option in options:
        kind = option.get("type", "string" if "const" in option else "object")
        values = option.get("enum", [option["const"]] if "const" in option else None)
        allowed[kind] = [*allowed.get(kind, []), *(["*"] if values is None else values)]
        if "$ref" in option:
            conditions.append({"if": {"type": kind}, "then": option})
        elif values is None:
            described = ("type", "title", "description", "default")
            rest |= {key: value for key, value in option.items() if key not in described}
    for kind, values in allowed.items():
        if "*" not in values:
            conditions.append({"if": {"type": kind}, "then": {"enum": values}})
    out = {"type": sorted(allowed)} | rest
    for condition in conditions:
        out = condition | {"else": out}
    return out


def _closed(node: Any) -> Any:
    """Where keys are fixed, `propertyNames` names them: Helm then reports what is allowed."""
    if isinstance(node, list):
        return [_closed(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    out = {key: _closed(inner) for key, inner in node.items()}
    if node.get("additionalProperties") is False and "properties" in node:
        out["propertyNames"] = {"enum": sorted(node["properties"])}
    return out


def refused_keys() -> list[dict[str, Any]]:
    """The engine config's refused keys, for the chart's templates."""
    return [
        {
            "path": key.path,
            "active": ACTIVE[key.active],
            "default": get_path(DEFAULTS, key.path),
            "text": f"{key.reason}; use {key.alternative}" if key.alternative else key.reason,
            **_conditions(key.path),
        }
        for key in KEYS.values()
        if key.status is REFUSED and key.active in ACTIVE
    ]


def _conditions(path: str) -> dict[str, Any]:
    """The defaults of the switches of its section that the key depends on."""
    outer = path.rpartition(".")[0]
    section = (get_path(DEFAULTS, outer) if outer else None) or {}
    off = {"enabled": False, "device": "none"}
    *names, last = outer.split(".")
    document: dict[str, Any] = {last: off}
    for name in reversed(names):
        document = {name: document}
    if is_in_force(document, path):
        return {}
    return {name: section[name] for name in off if name in section}


def update_values_table(page: str) -> str:
    """The README with its table of values regenerated."""
    before, rest = page.split(MARKERS[0])
    _, after = rest.split(MARKERS[1])
    lines = ["| value | default | what it is |", "|---|---|---|", *values_rows()]
    return before + MARKERS[0] + "\n".join(lines) + "\n" + MARKERS[1] + after


def values_rows() -> Iterator[str]:
    """A row for each value that values.yaml describes in a comment starting with `# --`."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    lines = text.splitlines()
    values = yaml.safe_load(text)
    for path, line in _key_lines("", yaml.compose(text, yaml.SafeLoader)):
        value = reduce(lambda inner, key: inner[key], path.split("."), values)
        comments = [lines[line - 1].strip()]
        if comments[0].startswith("# @default --"):
            comments.insert(0, lines[line - 2].strip())
        if comments[0].startswith("# --"):
            stated = comments[1].removeprefix("# @default --").strip() if len(comments) > 1 else ""
            default = stated or f"`{json.dumps(value)}`"
            yield f"| `{path}` | {default} | {comments[0].removeprefix('# --').strip()} |"


def described_values() -> set[str]:
    return {row.split("`")[1] for row in values_rows()}


def _key_lines(prefix: str, node: yaml.MappingNode) -> Iterator[tuple[str, int]]:
    """Dotted path and line of every key, except keys in flow mappings and keys with dots."""
    for key, value in node.value:
        if "." not in key.value:
            path = f"{prefix}{key.value}"
            yield path, key.start_mark.line
            if isinstance(value, yaml.MappingNode) and not value.flow_style:
                yield from _key_lines(f"{path}.", value)


def undescribed_values(node: yaml.MappingNode) -> list[str]:
    """Values without a description of their own, of a parent or of a child."""
    described = [f"{path}." for path in described_values()]
    paths = [f"{path}." for path, _ in _key_lines("", node)]
    return [
        path.rstrip(".")
        for path in paths
        if not any(path.startswith(it) or it.startswith(path) for it in described)
    ]


def test_chart_versions_match_project() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert f'version = "{chart["appVersion"]}"' in project
    assert values["rayVersion"] == pinned_version("ray")


def test_generated_parts_are_up_to_date() -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    assert schema == update_schema(deepcopy(schema)), HINT
    assert json.loads(REFUSED_KEYS.read_text(encoding="utf-8")) == refused_keys(), HINT
    page = README.read_text(encoding="utf-8")
    assert page == update_values_table(page), HINT


def test_every_value_is_described() -> None:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    assert undescribed_values(yaml.compose(text, yaml.SafeLoader)) == []
    extended = yaml.compose(f"{text}\nundescribed: 1", yaml.SafeLoader)
    assert undescribed_values(extended) == ["undescribed"]


if __name__ == "__main__":
    schema = update_schema(json.loads(SCHEMA.read_text(encoding="utf-8")))
    SCHEMA.write_text(json.dumps(schema, indent=2) + "\n", encoding="utf-8")
    REFUSED_KEYS.write_text(json.dumps(refused_keys(), indent=2) + "\n", encoding="utf-8")
    README.write_text(update_values_table(README.read_text(encoding="utf-8")), encoding="utf-8")
