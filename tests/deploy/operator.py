"""What KubeRay 1.7 refuses although its custom resource definitions allow it: the rules that its
operator checks when it first sees an object, as far as the chart can break them.

They were read in its source; no test runs an operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.deploy.chart import Object

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST = 47
"""Characters of a name, because those of pods and services are made of it."""
_OURS = ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME", "RAY_enable_autoscaler_v2")
"""Variables that its own options set."""


def refusals(one: Object) -> list[str]:
    """Why the operator would not take a RayJob or RayCluster; nothing for other objects."""
    if one["kind"] not in ("RayJob", "RayCluster"):
        return []
    name, is_job = one["metadata"]["name"], one["kind"] == "RayJob"
    cluster = one["spec"]["rayClusterSpec"] if is_job else one["spec"]
    found = [] if len(name) <= _LONGEST and _LABEL.fullmatch(name) else [f"the name {name!r}"]
    return [*found, *(_of_job(one["spec"]) if is_job else ()), *_of_cluster(cluster)]


def _of_job(spec: Object) -> Iterator[str]:
    cluster = spec["rayClusterSpec"]
    ends = spec.get("shutdownAfterJobFinishes", False)
    if spec.get("suspend") and not ends:
        yield "a suspended job whose cluster stays"
    if spec.get("ttlSecondsAfterFinished") and not ends:
        yield "a time to live of a cluster that stays"
    rules = spec.get("deletionStrategy", {})
    if ends and "deletionRules" in rules:
        yield "deletion rules of a cluster that ends by itself"
    if "DeleteWorkers" in str(rules) and cluster.get("enableInTreeAutoscaling"):
        yield "workers deleted beside an autoscaler"
    if spec.get("submissionMode") == "SidecarMode":
        if "submitterPodTemplate" in spec or "submitterConfig" in spec:
            yield "a submitting pod in SidecarMode"
        if cluster["headGroupSpec"]["template"]["spec"].get("restartPolicy", "Never") != "Never":
            yield "a head that is restarted in SidecarMode"


def _of_cluster(spec: Object) -> Iterator[str]:
    groups = spec["workerGroupSpecs"]
    templates = [one["template"]["spec"] for one in (spec["headGroupSpec"], *groups)]
    scaled = spec.get("enableInTreeAutoscaling", False)
    is_v2 = scaled and spec.get("autoscalerOptions", {}).get("version") == "v2"
    if is_v2 and any(one.get("restartPolicy", "Never") != "Never" for one in templates):
        yield "pods that are restarted beside the autoscaler v2"
    for group in groups:
        if "idleTimeoutSeconds" in group and not is_v2:
            yield f"an idle timeout of {group['groupName']} without the autoscaler v2"
        if group["minReplicas"] > group["maxReplicas"]:
            yield f"more replicas at least than at most of {group['groupName']}"
    names = {entry["name"] for entry in templates[0]["containers"][0]["env"]}
    yield from (f"the head's variable {name}" for name in _OURS if name in names)
    if spec["authOptions"]["mode"] == "token":
        major, minor, *_ = (int(part) for part in spec["rayVersion"].split("."))
        if (major, minor) < (2, 52):
            yield "a token for a Ray that knows none"
