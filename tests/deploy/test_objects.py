"""Every object the chart makes is one that Kubernetes takes, in every version and scenario."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import helm_python
import pytest

from tests.deploy.chart import (
    CHART,
    WITH_SCENARIOS,
    Object,
    objects_of_kind,
    render,
    render_scenario,
    scenario_values,
)
from tests.deploy.operator import refusals
from tests.deploy.schemas import KUBERNETES, check, is_built_in, needs_crds

WITH_VERSIONS = pytest.mark.parametrize("version", KUBERNETES)

# Single values and pairs, on top of which each is rendered and checked.
MATRIX: dict[str, dict[str, Any]] = {
    "names": {"nameOverride": "train", "fullnameOverride": "a-name-of-its-own"},
    "submission by the operator": {"job": {"submissionMode": "HTTPMode"}},
    "submission beside the head": {"job": {"submissionMode": "SidecarMode", "suspend": True}},
    "deadlines": {"job": {"activeDeadlineSeconds": 86400, "preRunningDeadlineSeconds": 600}},
    "the cluster stays": {"job": {"shutdownAfterJobFinishes": False}},
    "deletion policies": {
        "job": {
            "deletionStrategy": {
                "onSuccess": {"policy": "DeleteCluster"},
                "onFailure": {"policy": "DeleteNone"},
            }
        }
    },
    "deletion rules": {
        "autoscaler": {"enabled": False},
        "job": {
            "deletionStrategy": {
                "deletionRules": [
                    {
                        "policy": "DeleteWorkers",
                        "condition": {"jobStatus": "FAILED", "ttlSeconds": 60},
                    },
                    {"policy": "DeleteSelf", "condition": {"jobDeploymentStatus": "Failed"}},
                ]
            }
        },
    },
    "MultiKueue": {"job": {"managedBy": "kueue.x-k8s.io/multikueue"}},
    "runtime environment": {"job": {"runtimeEnv": {"env_vars": {"A": "1"}, "pip": ["einops"]}}},
    "submission beside a head that is not scaled": {
        "autoscaler": {"enabled": False},
        "job": {"submissionMode": "SidecarMode"},
    },
    "another name": {"job": {"suffix": "2"}},
    "nothing watched": {"metrics": {"enabled": False}},
    "watched": {
        "metrics": {
            "podMonitor": {"enabled": True},
            "prometheusRule": {"enabled": True},
            "dashboard": {"enabled": True},
        }
    },
    "autoscaler v1": {"autoscaler": {"version": "v1", "upscalingMode": "Aggressive"}},
    "open": {"networkPolicy": {"enabled": False}, "auth": {"enabled": False}},
    "accounts of others": {
        "serviceAccount": {"create": False, "name": "head", "workerName": "workers"},
        "rbac": {"create": False},
    },
    "accounts with identities": {"serviceAccount": {"annotations": {"iam/role": "training"}}},
    "one account": {"serviceAccount": {"name": "same", "workerName": "same"}},
    "credentials in a file": {
        "storage": {
            "pvc": {"enabled": False},
            "objectStore": {
                "url": "gs://bucket/runs",
                "credentialsFile": {"secretName": "gcp", "key": "key.json"},
            },
        }
    },
    "an S3 of one's own": {
        "storage": {
            "pvc": {"enabled": False},
            "objectStore": {
                "url": "s3://bucket/runs?endpoint_override=minio:9000&scheme=http",
                "secretName": "minio",
            },
        }
    },
    "storage class": {
        "storage": {"pvc": {"storageClassName": "fast", "accessModes": ["ReadWriteOnce"]}}
    },
    "pods": {
        "head": {
            "affinity": {"nodeAffinity": {}},
            "labels": {"a": "b"},
            "annotations": {"c": "d"},
            "env": [{"name": "E", "value": "f"}],
            "envFrom": [{"configMapRef": {"name": "g"}}],
            "volumes": [{"name": "data", "hostPath": {"path": "/data"}}],
            "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
            "rayStartParams": {"object-store-memory": "1000000000"},
            "terminationGracePeriodSeconds": 300,
        },
    },
    "queue of a cluster": {
        "mode": "cluster",
        "autoscaler": {"enabled": False},
        "kueue": {"queueName": "training"},
    },
}

WITH_VALUES = pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)


@WITH_SCENARIOS
def test_the_operator_takes_the_objects_of_scenarios(scenario: str) -> None:
    assert [text for one in render_scenario(scenario) for text in refusals(one)] == []


@WITH_VALUES
def test_the_operator_takes_the_objects_of_single_values(values: dict[str, Any]) -> None:
    assert [text for one in render(values) for text in refusals(one)] == []


def test_what_the_operator_refuses_is_seen() -> None:
    (job,) = deepcopy(objects_of_kind(render_scenario("default"), "RayJob"))
    assert refusals(job) == []
    job["metadata"]["name"] = "1-job"
    job["spec"] |= {"suspend": True, "shutdownAfterJobFinishes": False}
    job["spec"]["rayClusterSpec"]["autoscalerOptions"]["version"] = "v1"
    job["spec"]["rayClusterSpec"]["rayVersion"] = "2.51.1"
    assert refusals(job) == [
        "the name '1-job'",
        "a suspended job whose cluster stays",
        "a time to live of a cluster that stays",
        "an idle timeout of workers without the autoscaler v2",
        "a token for a Ray that knows none",
    ]


def broken(objects: Iterable[Object], version: str) -> list[str]:
    return [f"{one['kind']}: {text}" for one in objects for text in check(one, version)]


def own_and_custom(objects: Iterable[Object]) -> tuple[list[Object], list[Object]]:
    found = list(objects)
    return [o for o in found if is_built_in(o)], [o for o in found if not is_built_in(o)]


@WITH_VERSIONS
@WITH_SCENARIOS
def test_built_in_objects_of_scenarios_are_valid(scenario: str, version: str) -> None:
    own, _ = own_and_custom(render_scenario(scenario))
    assert own
    assert broken(own, version) == []


@WITH_SCENARIOS
def test_custom_resources_of_scenarios_are_valid(scenario: str) -> None:
    needs_crds()
    _, custom = own_and_custom(render_scenario(scenario))
    assert custom
    assert broken(custom, "") == []


@WITH_VALUES
def test_built_in_objects_of_single_values_are_valid(values: dict[str, Any]) -> None:
    own, _ = own_and_custom(render(values))
    assert [text for version in KUBERNETES for text in broken(own, version)] == []


@WITH_VALUES
def test_custom_resources_of_single_values_are_valid(values: dict[str, Any]) -> None:
    needs_crds()
    _, custom = own_and_custom(render(values))
    assert broken(custom, "") == []


@WITH_VERSIONS
@WITH_SCENARIOS
def test_helm_finds_nothing_to_say(scenario: str, version: str) -> None:
    report = helm_python.lint(
        str(CHART), scenario_values(scenario), strict=True, kube_version=f"v{version}.0"
    )
    assert report["errors"] == []
    assert [one for one in report["messages"] if one["severity"] > 1] == []


def test_a_wrong_object_is_seen() -> None:
    """A misspelt field in each kind, a broken CEL rule, a wrong value: or these tests are void."""
    needs_crds()
    for one in [*render_scenario("gpu"), *render_scenario("cluster")]:
        wrong = deepcopy(one)
        place = wrong.get("spec") if one["kind"] not in ("Role",) else wrong
        (place if place is not None else wrong)["mispelt"] = 1
        assert check(wrong, "1.32"), one["kind"]
    (job,) = deepcopy(objects_of_kind(render_scenario("default"), "RayJob"))
    job["spec"]["deletionStrategy"] = {"onSuccess": {"policy": "DeleteSelf"}}
    assert "BOTH onSuccess and onFailure" in check(job, "1.32")[0]
    job["spec"]["deletionStrategy"] = {"onSuccess": {"policy": "DeleteAll"}}
    assert "DeleteAll" in check(job, "1.32")[0]
    del job["spec"]["deletionStrategy"]
    container = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    container["resource"] = {}
    assert "resource" in check(job, "1.32")[0]
