"""Kubernetes, KubeRay and Helm accept every rendered object, in all versions and scenarios."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import helm_python
import pytest

from tests.deploy.chart import (
    CHART,
    SCENARIOS,
    WITH_SCENARIOS,
    Object,
    cases,
    objects_of_kind,
    render,
    render_scenario,
    scenario_values,
)
from tests.deploy.operator import operator_errors
from tests.deploy.schemas import KUBERNETES, is_built_in, skip_without_crds, validate

WITH_VERSIONS = pytest.mark.parametrize("version", KUBERNETES)
OLDEST = {"dra": "1.34"}
"""The first version of Kubernetes that has a scenario's kinds, where not all have them."""

VALUES = cases("valid")
WITH_INPUTS = pytest.mark.parametrize("name", [*SCENARIOS, *VALUES])


@cache
def rendered(name: str) -> tuple[Object, ...]:
    return render_scenario(name) if name in SCENARIOS else tuple(render(VALUES[name]))


@WITH_INPUTS
def test_operator_accepts_objects(name: str) -> None:
    assert [text for item in rendered(name) for text in operator_errors(item)] == []


def test_operator_errors_are_detected() -> None:
    (job,) = deepcopy(objects_of_kind(render_scenario("default"), "RayJob"))
    assert operator_errors(job) == []
    job["metadata"]["name"] = "1-job"
    job["spec"] |= {"suspend": True, "shutdownAfterJobFinishes": False}
    job["spec"]["ttlSecondsAfterFinished"] = 60
    job["spec"]["rayClusterSpec"]["autoscalerOptions"]["version"] = "v1"
    job["spec"]["rayClusterSpec"]["rayVersion"] = "2.51.1"
    assert operator_errors(job) == [
        "invalid name '1-job'",
        "suspended job without shutdownAfterJobFinishes",
        "ttlSecondsAfterFinished without shutdownAfterJobFinishes",
        "idleTimeoutSeconds of workers without autoscaler v2",
        "token authentication needs Ray 2.52",
    ]


@WITH_VERSIONS
def test_built_in_objects_are_valid(version: str) -> None:
    """All inputs in one pass, in which a version's schemas are parsed once."""
    errors = {
        name: [f"{item['kind']}: {error}" for item in built_in for error in validate(item, version)]
        for name in (*SCENARIOS, *VALUES)
        if (built_in := [item for item in rendered(name) if is_built_in(item)])
    }
    minor = int(version.partition(".")[2])
    for name, oldest in OLDEST.items():
        too_old = minor < int(oldest.partition(".")[2])
        assert bool(errors.pop(name)) is too_old, name
    assert [f"{name}: {error}" for name, found in errors.items() for error in found] == []


@WITH_INPUTS
def test_custom_resources_are_valid(name: str) -> None:
    skip_without_crds()
    resources = [item for item in rendered(name) if not is_built_in(item)]
    assert resources
    assert [error for item in resources for error in validate(item, "")] == []


@pytest.mark.parametrize("version", [KUBERNETES[0], KUBERNETES[-1]])
@WITH_SCENARIOS
def test_helm_lint_passes(scenario: str, version: str) -> None:
    report = helm_python.lint(
        str(CHART), scenario_values(scenario), strict=True, kube_version=f"v{version}.0"
    )
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


def test_error_of_the_code_ends_the_job_and_a_killed_head_does_not() -> None:
    """KubeRay starts new clusters for both alike, by `backoffLimit`. A head alone it replaces, and
    the submitter's pod, which fails while no head answers, submits again to the new one."""
    (job,) = objects_of_kind(render({}), "RayJob")
    assert job["spec"]["backoffLimit"] == 0
    delays_s = [10 * 2**index for index in range(job["spec"]["submitterConfig"]["backoffLimit"])]
    assert sum(delays_s) >= 600, "too short for a new node"
    (job,) = objects_of_kind(render({"job": {"backoffLimit": 3}}), "RayJob")
    assert job["spec"]["backoffLimit"] == 3


def test_ray_job_has_no_failure_policy() -> None:
    """If it gets one, the chart can retry by exit code."""
    skip_without_crds()
    (job,) = objects_of_kind(render({}), "RayJob")
    for at in (job["spec"], job["spec"]["submitterConfig"]):
        at["podFailurePolicy"] = {"rules": []}
    errors = validate(job, KUBERNETES[-1])
    assert len(errors) == 2
    assert all("podFailurePolicy" in error for error in errors)


def test_invalid_objects_are_detected() -> None:
    """An unknown field in each kind, a violated CEL rule, and an invalid value."""
    skip_without_crds()
    for item in [*render_scenario("gpu"), *render_scenario("cluster")]:
        invalid = deepcopy(item)
        spec = invalid.get("spec") if item["kind"] not in ("Role",) else invalid
        (spec if spec is not None else invalid)["misspelled"] = 1
        assert validate(invalid, "1.32"), item["kind"]
    (job,) = deepcopy(objects_of_kind(render_scenario("default"), "RayJob"))
    job["spec"]["deletionStrategy"] = {"onSuccess": {"policy": "DeleteSelf"}}
    assert "BOTH onSuccess and onFailure" in validate(job, "1.32")[0]
    job["spec"]["deletionStrategy"] = {"onSuccess": {"policy": "DeleteAll"}}
    assert "DeleteAll" in validate(job, "1.32")[0]
    del job["spec"]["deletionStrategy"]
    container = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    container["resource"] = {}
    assert "resource" in validate(job, "1.32")[0]
