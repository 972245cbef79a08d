"""Schemas of Kubernetes' own kinds and of custom resources, strict: what is misspelt is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import celpy
import jsonschema
import kubernetes_validate
import pytest
import yaml

KUBERNETES = ("1.27", "1.32", "1.37")
CRDS = Path(os.environ["RAYZERO_CRDS"]) if "RAYZERO_CRDS" in os.environ else None
OWN_GROUPS = ("apps", "batch", "networking.k8s.io", "policy", "rbac.authorization.k8s.io")

_METADATA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


def needs_crds() -> None:
    """Skips a test where nobody gave the definitions of custom resources."""
    if CRDS is None or not list(CRDS.glob("*.yaml")):
        pytest.skip(f"RAYZERO_CRDS names no folder of custom resource definitions: {CRDS}")


def is_built_in(obj: dict[str, Any]) -> bool:
    """Whether Kubernetes itself knows the object's kind."""
    group = str(obj["apiVersion"]).rpartition("/")[0]
    return group == "" or group in OWN_GROUPS


def check(obj: dict[str, Any], version: str) -> list[str]:
    """What is wrong with an object in that version of Kubernetes."""
    return list(_check(json.dumps(obj), version if is_built_in(obj) else ""))


@cache  # most objects are the same in most renders
def _check(text: str, version: str) -> list[str]:
    obj = json.loads(text)
    if version:
        try:
            kubernetes_validate.validate(obj, version, strict=True)
        except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
            return [str(error).splitlines()[0]]
        return []
    schema = _custom(obj["apiVersion"], obj["kind"])
    found = jsonschema.Draft202012Validator(_as_json_schema(obj["apiVersion"], obj["kind"]))
    wrong = [f"{error.json_path}: {error.message}" for error in found.iter_errors(obj)]
    return wrong or [*_broken_rules(schema, obj, "$")]


@cache
def _custom(api_version: str, kind: str) -> dict[str, Any]:
    """The schema of a custom resource as its definition has it."""
    group, _, version = api_version.partition("/")
    for path in CRDS.glob(f"{group}_*.yaml") if CRDS is not None else ():
        definition = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)
        if definition["spec"]["names"]["kind"] == kind:
            (found,) = [v for v in definition["spec"]["versions"] if v["name"] == version]
            return found["schema"]["openAPIV3Schema"]
    raise LookupError(f"no definition of {api_version} {kind} in {CRDS}")


@cache
def _as_json_schema(api_version: str, kind: str) -> dict[str, Any]:
    schema = _strict(_custom(api_version, kind))
    schema["properties"]["metadata"] = _METADATA
    return schema


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A structural schema as a JSON schema that knows no other keys than those it names."""
    out = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    out.pop("description", None)
    out.pop("format", None)
    out.pop("default", None)
    if schema.get("x-kubernetes-int-or-string"):
        out["anyOf"] = [{"type": "integer"}, {"type": "string"}]
        out.pop("type", None)
    if out.pop("nullable", False) and "type" in out:
        out["type"] = [out["type"], "null"]
    if "properties" in out:
        out["properties"] = {key: _strict(value) for key, value in out["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            out.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(out.get(key), dict):
            out[key] = _strict(out[key])
    return out


def _broken_rules(schema: dict[str, Any], value: Any, path: str) -> Iterator[str]:
    """The CEL rules that a value breaks, at any depth. Rules about changes (`oldSelf`) do not apply
    to a new object."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in rule["rule"] and not _holds(rule["rule"], value):
            yield f"{path}: {rule.get('message', rule['rule'])}"
    if isinstance(value, dict):
        inner = schema.get("properties", {})
        rest = schema.get("additionalProperties")
        for key, one in value.items():
            found = inner.get(key, rest if isinstance(rest, dict) else {})
            yield from _broken_rules(found, one, f"{path}.{key}")
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from _broken_rules(schema.get("items", {}), one, f"{path}[{index}]")


@cache
def _program(rule: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def _holds(rule: str, value: Any) -> bool:
    return bool(_program(rule).evaluate({"self": celpy.json_to_cel(value)}))
