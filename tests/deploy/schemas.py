"""Strict schemas of Kubernetes' own kinds and of custom resources: unknown fields are errors."""

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

KUBERNETES = tuple(f"1.{minor}" for minor in range(27, 38))
CRDS = Path(os.environ["RAYZERO_CRDS"]) if "RAYZERO_CRDS" in os.environ else None
BUILT_IN_GROUPS = tuple(
    ("apps batch networking.k8s.io policy rbac.authorization.k8s.io resource.k8s.io").split()
)

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


def skip_without_crds() -> None:
    """Skips the test if RAYZERO_CRDS has no custom resource definitions."""
    if CRDS is None or not list(CRDS.glob("*.yaml")):
        pytest.skip(f"RAYZERO_CRDS names no folder of custom resource definitions: {CRDS}")


def is_built_in(obj: dict[str, Any]) -> bool:
    """Whether the object's kind is Kubernetes' own, not a custom resource."""
    group = str(obj["apiVersion"]).rpartition("/")[0]
    return group == "" or group in BUILT_IN_GROUPS


def validate(obj: dict[str, Any], version: str) -> list[str]:
    """Validation errors of an object in a version of Kubernetes."""
    return list(_validate(json.dumps(obj), version if is_built_in(obj) else ""))


@cache  # most objects are identical in most scenarios
def _validate(text: str, version: str) -> list[str]:
    obj = json.loads(text)
    if version:
        try:
            kubernetes_validate.validate(obj, version, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            return [f"Kubernetes {version} has no {obj['kind']} in {obj['apiVersion']}"]
        except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
            return [str(error).splitlines()[0]]
        return []
    schema = _crd_schema(obj["apiVersion"], obj["kind"])
    validator = jsonschema.Draft202012Validator(_json_schema(obj["apiVersion"], obj["kind"]))
    errors = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(obj)]
    return errors or [*_violated_rules(schema, obj, "$")]


@cache
def _crd_schema(api_version: str, kind: str) -> dict[str, Any]:
    """The schema in the definition of a custom resource."""
    group, _, version = api_version.partition("/")
    for path in CRDS.glob(f"{group}_*.yaml") if CRDS is not None else ():
        definition = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)
        if definition["spec"]["names"]["kind"] == kind:
            versions = {entry["name"]: entry for entry in definition["spec"]["versions"]}
            return versions[version]["schema"]["openAPIV3Schema"]
    raise LookupError(f"no definition of {api_version} {kind} in {CRDS}")


@cache
def _json_schema(api_version: str, kind: str) -> dict[str, Any]:
    schema = _strict(_crd_schema(api_version, kind))
    schema["properties"]["metadata"] = _METADATA
    return schema


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A structural schema as a JSON schema that allows no additional properties."""
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


def _violated_rules(schema: dict[str, Any], value: Any, path: str) -> Iterator[str]:
    """CEL rules that a value violates, at any depth. Transition rules (`oldSelf`) do not apply to a
    new object."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in rule["rule"] and not _evaluate(rule["rule"], value):
            yield f"{path}: {rule.get('message', rule['rule'])}"
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        additional = schema.get("additionalProperties")
        default = additional if isinstance(additional, dict) else {}
        for key, item in value.items():
            yield from _violated_rules(properties.get(key, default), item, f"{path}.{key}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _violated_rules(schema.get("items", {}), item, f"{path}[{index}]")


@cache
def _program(rule: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def _evaluate(rule: str, value: Any) -> bool:
    return bool(_program(rule).evaluate({"self": celpy.json_to_cel(value)}))
