"""Rules that the KubeRay 1.7 operator checks beyond its custom resource definitions.

They were read in its source, as far as the chart can violate them; no test runs an operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.deploy.chart import Object

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MAX_NAME_LENGTH = 47
"""KubeRay derives the names of pods and services from it."""
_RESERVED_VARIABLES = (
    "RAY_REDIS_ADDRESS",
    "REDIS_PASSWORD",
    "REDIS_USERNAME",
    "RAY_enable_autoscaler_v2",
)
"""Environment variables that KubeRay sets from its own options."""


def operator_errors(resource: Object) -> list[str]:
    """Why the operator would reject a RayJob or RayCluster; empty for other kinds."""
    if resource["kind"] not in ("RayJob", "RayCluster"):
        return []
    name, is_job = resource["metadata"]["name"], resource["kind"] == "RayJob"
    cluster = resource["spec"]["rayClusterSpec"] if is_job else resource["spec"]
    valid_name = len(name) <= _MAX_NAME_LENGTH and _LABEL.fullmatch(name)
    errors = [] if valid_name else [f"invalid name {name!r}"]
    return [*errors, *(_job_errors(resource["spec"]) if is_job else ()), *_cluster_errors(cluster)]


def _job_errors(spec: Object) -> Iterator[str]:
    cluster = spec["rayClusterSpec"]
    shuts_down = spec.get("shutdownAfterJobFinishes", False)
    if spec.get("suspend") and not shuts_down:
        yield "suspended job without shutdownAfterJobFinishes"
    if spec.get("ttlSecondsAfterFinished") and not shuts_down:
        yield "ttlSecondsAfterFinished without shutdownAfterJobFinishes"
    strategy = spec.get("deletionStrategy", {})
    if shuts_down and "deletionRules" in strategy:
        yield "deletionRules with shutdownAfterJobFinishes"
    if "DeleteWorkers" in str(strategy) and cluster.get("enableInTreeAutoscaling"):
        yield "DeleteWorkers with the autoscaler"
    if spec.get("submissionMode") == "SidecarMode":
        if "submitterPodTemplate" in spec or "submitterConfig" in spec:
            yield "submitter pod in SidecarMode"
        if cluster["headGroupSpec"]["template"]["spec"].get("restartPolicy", "Never") != "Never":
            yield "head with a restartPolicy in SidecarMode"


def _cluster_errors(spec: Object) -> Iterator[str]:
    groups = spec["workerGroupSpecs"]
    pod_specs = [group["template"]["spec"] for group in (spec["headGroupSpec"], *groups)]
    autoscales = spec.get("enableInTreeAutoscaling", False)
    is_v2 = autoscales and spec.get("autoscalerOptions", {}).get("version") == "v2"
    if is_v2 and any(pod.get("restartPolicy", "Never") != "Never" for pod in pod_specs):
        yield "pods with a restartPolicy and autoscaler v2"
    for group in groups:
        if "idleTimeoutSeconds" in group and not is_v2:
            yield f"idleTimeoutSeconds of {group['groupName']} without autoscaler v2"
        if group["minReplicas"] > group["maxReplicas"]:
            yield f"minReplicas of {group['groupName']} above maxReplicas"
    names = {entry["name"] for entry in pod_specs[0]["containers"][0]["env"]}
    yield from (f"reserved variable {name}" for name in _RESERVED_VARIABLES if name in names)
    if spec["authOptions"]["mode"] == "token":
        major, minor, *_ = (int(part) for part in spec["rayVersion"].split("."))
        if (major, minor) < (2, 52):
            yield "token authentication needs Ray 2.52"
