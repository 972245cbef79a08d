"""Values that a schema cannot refuse: they do not go together, or belong elsewhere. Each message
has the paths of the values and says what to do."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest

from tests.deploy.chart import render, render_text

PRIVILEGED = {"name": "a", "image": "b", "securityContext": {"privileged": True}}
LOCKS = {"name": "ray-worker", "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}
BOTH = ("requests", "limits")
FOUR = {key: {"nvidia.com/gpu": 4} for key in BOTH}
CONFLICTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "two storage locations": (
        {"storage": {"objectStore": {"url": "s3://bucket/runs"}}},
        ("storage.objectStore.url", "storage.pvc.enabled"),
    ),
    "no image": (
        {"image": {"repository": ""}},
        ("image.repository: not given", "registry.example.com/rayzero"),
    ),
    "GPUs that the job does not take": (
        {"job": {"spec": {"workers": {"gpus": 0}}}},
        ("job.spec.workers.gpus", "each pod of workers has 1", "workers.resources", "to null"),
    ),
    "capability of a user other than root": (
        {"workers": {"podTemplate": {"spec": {"containers": [LOCKS]}}}},
        ("workers.podTemplate.spec", "ray-worker adds", "IPC_LOCK", "runAsUser to 0", "LimitMEM"),
    ),
    "no storage location": ({"storage": {"pvc": {"enabled": False}}}, ("storage.pvc.enabled",)),
    "queue and autoscaler": (
        {"kueue": {"queueName": "q"}},
        ("kueue.queueName", "autoscaler.enabled"),
    ),
    "queue and a cluster that is kept": (
        {
            "kueue": {"queueName": "q"},
            "autoscaler": {"enabled": False},
            "job": {"shutdownAfterJobFinishes": False},
        },
        ("kueue.queueName", "job.shutdownAfterJobFinishes"),
    ),
    "suspended, and its cluster is kept": (
        {"job": {"suspend": True, "shutdownAfterJobFinishes": False}},
        ("job.suspend", "job.shutdownAfterJobFinishes"),
    ),
    "suspended, with a deletion strategy": (
        {
            "job": {
                "suspend": True,
                "deletionStrategy": {
                    "onSuccess": {"policy": "DeleteSelf"},
                    "onFailure": {"policy": "DeleteNone"},
                },
            }
        },
        ("job.suspend", "job.deletionStrategy"),
    ),
    "workers deleted beside the autoscaler": (
        {
            "job": {
                "deletionStrategy": {
                    "onSuccess": {"policy": "DeleteWorkers"},
                    "onFailure": {"policy": "DeleteNone"},
                }
            }
        },
        ("job.deletionStrategy", "autoscaler.enabled"),
    ),
    "name starts with a digit": ({"fullnameOverride": "1st"}, ("fullnameOverride", "1st")),
    "Ray version without tokens": ({"rayVersion": "2.51.0"}, ("rayVersion", "auth.enabled")),
    "minimum above maximum": (
        {"workers": {"min": 5, "max": 4}},
        ("workers.max", "workerGroups[0]", "max is 4", "raise max"),
    ),
    "duplicate group": (
        {"workerGroups": [{"name": "a"}, {"name": "a"}]},
        ("workerGroups[1].name",),
    ),
    "too short for the last checkpoint": (
        {"workers": {"terminationGracePeriodSeconds": 10}},
        ("workers.terminationGracePeriodSeconds", "grace_period_s"),
    ),
    "too few GPUs": (
        {"job": {"spec": {"workers": {"min": 5, "max": 8}}}},
        ("job.spec.workers", "5 workers", "4 of workers with 4 CPUs and 1 GPUs"),
    ),
    "pods too small": (
        {"job": {"spec": {"workers": {"cpus": 16}}}},
        ("job.spec.workers", "of 16 CPUs", "with 4 CPUs", "room for 0 workers", "resources.limits"),
    ),
    "two uses of a port": (
        {"head": {"commandPort": 9400}},
        ("head.commandPort", "9400 would be the port of commands and of rayzero-metrics"),
    ),
    "elastic queue without autoscaler": (
        {"kueue": {"queueName": "q", "elastic": True}, "autoscaler": {"enabled": False}},
        ("kueue.elastic", "autoscaler.enabled"),
    ),
    "two queues": (
        {
            "kueue": {"queueName": "q"},
            "gang": {"scheduler": "volcano"},
            "autoscaler": {"enabled": False},
        },
        ("kueue.queueName", "gang.scheduler"),
    ),
    "queue of no scheduler": ({"gang": {"queueName": "q"}}, ("gang.queueName", "gang.scheduler")),
    "priority with YuniKorn": (
        {"gang": {"scheduler": "yunikorn", "priorityClass": "p"}},
        ("gang.priorityClass", "workers.priorityClassName"),
    ),
    "secret among extra objects": (
        {"extraObjects": [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "key"}}]},
        ("extraObjects", "Secret key"),
    ),
    "privileged without escalation": (
        {"workers": {"podTemplate": {"spec": {"containers": [PRIVILEGED]}}}},
        ("workers.podTemplate.spec", "container a", "allowPrivilegeEscalation: true"),
    ),
    "fewer pods without the autoscaler": (
        {"job": {"spec": {"workers": {"min": 3}}}, "autoscaler": {"enabled": False}},
        ("3 workers", "at most 2 of workers", "workers.min"),
    ),
    "thousandths of a CPU": (
        {
            "job": {"spec": {"workers": {"gpus": 0, "min": 4}}},
            "workers": {
                "max": 2,
                "resources": {key: {"cpu": "500m", "nvidia.com/gpu": None} for key in BOTH},
            },
        },
        ("4 workers", "2 of workers with 1 CPUs"),
    ),
    "volume of the chart": (
        {"head": {"volumes": [{"name": "tmp", "emptyDir": {}}]}},
        ("head.volumes[0].name", "tmp is a volume of the chart", "head.podTemplate"),
    ),
    "folder of the chart": (
        {"workerGroups": [{"name": "a", "volumeMounts": [{"name": "d", "mountPath": "/tmp/"}]}]},
        ("workerGroups[0].volumeMounts[0].mountPath", "/tmp", "take another folder"),
    ),
    "variable of KubeRay": (
        {"head": {"env": [{"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"}]}},
        ("head.env[0].name", "RAY_REDIS_ADDRESS", "gcsFaultTolerance"),
    ),
    "another dashboard port": (
        {"head": {"rayStartParams": {"dashboard-port": "8300"}}},
        ("head.rayStartParams.dashboard-port", "leave it out"),
    ),
    "label of the selector": (
        {"workers": {"podTemplate": {"metadata": {"labels": {"app.kubernetes.io/instance": "a"}}}}},
        ("workers.podTemplate.metadata.labels", "app.kubernetes.io/instance", "another label"),
    ),
    "label of the selector for all": (
        {"commonLabels": {"app.kubernetes.io/part-of": "a"}},
        ("commonLabels: app.kubernetes.io/part-of", "another label"),
    ),
    "label of the selector for workers": (
        {"workers": {"labels": {"app.kubernetes.io/component": "a"}}},
        ("workers.labels: app.kubernetes.io/component", "another label"),
    ),
    "submitter without a pod": (
        {"job": {"submissionMode": "HTTPMode", "submitter": {"annotations": {"a": "b"}}}},
        ("job.submitter.annotations", "HTTPMode there is no submitter's pod", "set K8sJobMode"),
    ),
    "request above limit of the submitter": (
        {"job": {"submitter": {"resources": {"requests": {"memory": "2Gi"}}}}},
        ("job.submitter.resources", "2Gi", "limits.memory (1Gi)"),
    ),
    "restart policy of the submitter": (
        {"job": {"submitter": {"podTemplate": {"spec": {"restartPolicy": "OnFailure"}}}}},
        ("job.submitter.podTemplate.spec.restartPolicy", "leave it out"),
    ),
    "misspelt container of the submitter": (
        {"job": {"submitter": {"podTemplate": {"spec": {"containers": [{"name": "submitter"}]}}}}},
        ("job.submitter.podTemplate.spec", "submitter has no image", "ray-job-submitter"),
    ),
    "grace period in the pod template": (
        {"workers": {"podTemplate": {"spec": {"terminationGracePeriodSeconds": 5}}}},
        ("workers.podTemplate.spec.term", "set workers.terminationGracePeriodSeconds"),
    ),
    "restart policy": (
        {"head": {"podTemplate": {"spec": {"restartPolicy": "OnFailure"}}}},
        ("head.podTemplate.spec.restartPolicy", "autoscaler.version", "leave it out"),
    ),
    "resources in the pod template": (
        {
            "workers": {
                "podTemplate": {
                    "spec": {
                        "containers": [{"name": "ray-worker", "resources": {"limits": {"cpu": 1}}}]
                    }
                }
            }
        },
        ("workers.podTemplate.spec.containers[0].resources", "are workers.resources"),
    ),
    "misspelt container": (
        {"head": {"podTemplate": {"spec": {"containers": [{"name": "ray-haed"}]}}}},
        ("head.podTemplate.spec", "ray-haed has no image", "ray-head"),
    ),
    "request above limit": (
        {"workers": {"resources": {"requests": {"memory": "33000Mi"}}}},
        ("workers (group workers).resources", "33000Mi", "limits.memory (32Gi)"),
    ),
    "fewer GPUs requested": (
        {"workers": {"resources": {"limits": {"nvidia.com/gpu": 8}}}},
        ("requests.nvidia.com/gpu is 1, limits.nvidia.com/gpu is 8", "only equal ones"),
    ),
    "shared memory of the whole pod": (
        {"head": {"shmSize": "8192Mi"}},
        ("head.shmSize: 8192Mi", "resources.limits.memory (8Gi)", "lower it"),
    ),
    "relative checkpoint path": (
        {"job": {"spec": {"checkpoint": {"path": "runs"}}}},
        ("job.spec.checkpoint.path: runs would be lost", "storage.pvc", "a URL"),
    ),
    "checkpoints in /tmp": (
        {"job": {"spec": {"checkpoint": {"path": "/tmp/runs"}}}},
        ("job.spec.checkpoint.path: /tmp/runs would be lost",),
    ),
    "priority without a queue": (
        {"kueue": {"priorityClass": "high"}},
        ("kueue.priorityClass: needs kueue.queueName", "workers.priorityClassName"),
    ),
    "autoscaler without the API": (
        {"networkPolicy": {"egress": {"enabled": True}}},
        ("networkPolicy.egress.rules", "Kubernetes API", "autoscaler.enabled to false"),
    ),
    "open to the world": (
        {"auth": {"enabled": False}, "head": {"serviceType": "LoadBalancer"}},
        ("auth.enabled", "head.serviceType", "LoadBalancer", "ClusterIP"),
    ),
    "secret as a value": (
        {"storage": {"objectStore": {"env": {"AWS_SECRET_ACCESS_KEY": "p4ss"}}}},
        ("storage.objectStore.env.AWS_SECRET_ACCESS_KEY", "storage.objectStore.secretName"),
    ),
}


@pytest.mark.parametrize(("values", "words"), CONFLICTS.values(), ids=CONFLICTS)
def test_chart_rejects_conflicting_values(values: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(helm_python.HelmError) as caught:
        render_text(values)
    assert [word for word in words if word not in str(caught.value)] == []


def test_checkpoints_on_a_volume_of_ones_own() -> None:
    mounts = [{"name": "data", "mountPath": "/work/data"}]
    volumes = [{"name": "data", "nfs": {"server": "nfs", "path": "/data"}}]
    pods = {"volumes": volumes, "volumeMounts": mounts}
    path = {"job": {"spec": {"checkpoint": {"path": "/work/data/runs"}}}}
    assert render({"head": pods, "workers": pods, **path})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"job": {"spec": {"workers": {"min": 4, "cpus": 3}}}, "workers": {"resources": FOUR}},
            ("3 of the 4 GPUs of each pod of workers", "job.spec.workers.cpus"),
        ),
        (
            {"job": {"spec": {"workers": {"min": 2, "max": 2}}}, "workers": {"min": 4}},
            ("room for 4 workers", "at most 2", "Lower workers.min"),
        ),
        ({}, ()),
    ],
)
def test_notes_warn_of_idle_gpus(values: dict[str, Any], words: tuple[str, ...]) -> None:
    notes = render_text(values)["templates/NOTES.txt"]
    assert [word for word in words if word not in notes] == []
    assert ("will be idle" in notes) is bool(words)
