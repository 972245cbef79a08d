"""Invalid values are rejected with a message that names them and says what is allowed."""

from __future__ import annotations

import re
from typing import Any

import helm_python
import pytest

from tests.deploy.chart import render, render_text

GPU, BOTH = "nvidia.com/gpu", ("requests", "limits")

# Values that the schema rejects, and the path in the message.
SCHEMA_VIOLATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"worker": {}}, "worker"),
    "unknown inside": ({"head": {"resource": {}}}, "resource"),
    "unknown in a group": ({"workerGroups": [{"name": "a", "minn": 1}]}, "/workerGroups/0"),
    "mode": ({"mode": "service"}, "/mode"),
    "release name": ({"fullnameOverride": "Upper_case"}, "/fullnameOverride"),
    "digest": ({"image": {"digest": "sha256:12"}}, "/image/digest"),
    "pull policy": ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
    "pull secret as text": ({"imagePullSecrets": ["registry"]}, "/imagePullSecrets/0"),
    "Ray version": ({"rayVersion": "latest"}, "/rayVersion"),
    "submission": ({"job": {"submissionMode": "Interactive"}}, "/job/submissionMode"),
    "backoff": ({"job": {"backoffLimit": -1}}, "/job/backoffLimit"),
    "deadline": ({"job": {"activeDeadlineSeconds": "1h"}}, "/job/activeDeadlineSeconds"),
    "ttl": ({"job": {"ttlSecondsAfterFinished": 0.5}}, "/job/ttlSecondsAfterFinished"),
    "suffix": ({"job": {"suffix": "-2"}}, "/job/suffix"),
    "deletion": (
        {"job": {"deletionStrategy": {"onSuccess": {"policy": "Delete"}}}},
        "/job/deletionStrategy/onSuccess/policy",
    ),
    "manager": ({"job": {"managedBy": "me"}}, "/job/managedBy"),
    "job's unknown key": ({"job": {"spec": {"step": 3}}}, "/job/spec"),
    "job's name": ({"job": {"spec": {"name": "../up"}}}, "/job/spec/name"),
    "job's steps": ({"job": {"spec": {"steps": 0}}}, "/job/spec/steps"),
    "job's steps as text": ({"job": {"spec": {"steps": "many"}}}, "/job/spec/steps"),
    "job's workers": ({"job": {"spec": {"workers": {"min": 0}}}}, "/job/spec/workers/min"),
    "job's GPUs": ({"job": {"spec": {"workers": {"gpus": 2}}}}, "/job/spec/workers/gpus"),
    "job's grace period": (
        {"job": {"spec": {"checkpoint": {"grace_period_s": 0}}}},
        "/job/spec/checkpoint/grace_period_s",
    ),
    "engine's unknown key": ({"job": {"engine": {"zero_optimisation": {}}}}, "'zero_optimisation'"),
    "engine's unknown key in a section": (
        {"job": {"engine": {"zero_optimization": {"offload_optimizer": {"devic": "cpu"}}}}},
        "/job/engine/zero_optimization/offload_optimizer': additional properties 'devic'",
    ),
    "engine's value": (
        {"job": {"engine": {"zero_optimization": {"stage": 7}}}},
        "/job/engine/zero_optimization/stage",
    ),
    "engine's number": ({"job": {"engine": {"train_batch_size": -1}}}, "/train_batch_size"),
    "job's engine": ({"job": {"spec": {"engine": {"bf61": {}}}}}, "/job/spec/engine"),
    "engine as text": ({"job": {"engine": "engine.json"}}, "/job/engine"),
    "no memory limit": ({"head": {"resources": {"limits": {"memory": None}}}}, "/head/resources"),
    "quantity": (
        {"workers": {"resources": {"limits": {"memory": "32 GB"}}}},
        "/workers/resources/limits/memory",
    ),
    "shm": ({"workers": {"shmSize": "8"}}, "/workers/shmSize"),
    "minimum": ({"workers": {"min": -1}}, "/workers/min"),
    "maximum": ({"workers": {"max": 0}}, "/workers/max"),
    "CPUs as a number": ({"head": {"numCpus": 2}}, "/head/numCpus"),
    "parameter as a number": (
        {"head": {"rayStartParams": {"num-gpus": 1}}},
        "/head/rayStartParams/num-gpus",
    ),
    "toleration": (
        {"workers": {"tolerations": [{"key": "a", "effect": "Never"}]}},
        "/workers/tolerations/0/effect",
    ),
    "affinity": ({"workers": {"affinity": {"podAffinities": {}}}}, "/workers/affinity"),
    "environment": ({"head": {"env": [{"value": "1"}]}}, "/head/env/0"),
    "mount": (
        {"head": {"volumeMounts": [{"name": "a", "mountPath": "data"}]}},
        "/head/volumeMounts/0/mountPath",
    ),
    "pod template": ({"head": {"podTemplate": {"spec": {"runtimeClas": "x"}}}}, "'runtimeClas'"),
    "pod template's container": (
        {"workers": {"podTemplate": {"spec": {"containers": [{"image": "a"}]}}}},
        "/workers/podTemplate/spec/containers/0",
    ),
    "pod template's security": (
        {
            "workerGroups": [
                {"name": "a", "podTemplate": {"spec": {"securityContext": {"runAsUser": "root"}}}}
            ]
        },
        "/workerGroups/0/podTemplate/spec/securityContext/runAsUser",
    ),
    "pod template's host network": (
        {"workers": {"podTemplate": {"spec": {"hostNetwork": "yes"}}}},
        "/workers/podTemplate/spec/hostNetwork",
    ),
    "resource without a domain": (
        {"workers": {"resources": {"limits": {"gpu": 1}}}},
        "/workers/resources/limits': additional properties 'gpu'",
    ),
    "secret's key": (
        {"head": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "b"}}}]}},
        "/head/env/0/valueFrom/secretKeyRef': missing property 'key'",
    ),
    "node affinity": (
        {"workers": {"affinity": {"nodeAffinity": {"required": {}}}}},
        "/workers/affinity/nodeAffinity': additional properties 'required'",
    ),
    "volume": (
        {"head": {"volumes": [{"name": "a", "nsf": {"server": "b", "path": "/"}}]}},
        "/head/volumes/0': additional properties 'nsf'",
    ),
    "volume's name": (
        {"head": {"volumes": [{"name": "My_data", "emptyDir": {}}]}},
        "/head/volumes/0/name': 'My_data' does not match",
    ),
    "network address": (
        {"networkPolicy": {"dashboardFrom": [{"ipBlock": {"cidr": "10.0.0.1"}}]}},
        "/networkPolicy/dashboardFrom/0/ipBlock/cidr",
    ),
    "runtime environment": ({"job": {"runtimeEnv": {"workdir": "s3://a/b.zip"}}}, "'workdir'"),
    "tag in the repository": ({"image": {"repository": "host:5000/a:7"}}, "/image/repository"),
    "engine's number as text": (
        {"job": {"engine": {"train_batch_size": "many"}}},
        "/job/engine/train_batch_size",
    ),
    "engine's choice": (
        {"job": {"engine": {"zero_optimization": {"offload_optimizer": {"device": "disk"}}}}},
        "/offload_optimizer/device': value must be one of 'none', 'cpu', 'nvme'",
    ),
    "extra object": ({"extraObjects": [{"kind": "ConfigMap"}]}, "/extraObjects/0"),
    "branch as commit": ({"code": {"git": {"commit": "main"}}}, "/code/git/commit"),
    "no commit": ({"code": {"git": {"repository": "https://host/code"}}}, "/code/git/commit"),
    "gang scheduler": ({"gang": {"scheduler": "kueue"}}, "/gang/scheduler"),
    "no groups": ({"workerGroups": []}, "/workerGroups"),
    "group's name": ({"workerGroups": [{"name": "GPU"}]}, "/workerGroups/0/name"),
    "autoscaler": ({"autoscaler": {"version": "v3"}}, "/autoscaler/version"),
    "health check": ({"healthCheck": {"periodMs": 0}}, "/healthCheck/periodMs"),
    "no Redis address": (
        {"gcsFaultTolerance": {"enabled": True}},
        "/gcsFaultTolerance/redisAddress",
    ),
    "NCCL": ({"nccl": {"DEBUG": "INFO"}}, "/nccl"),
    "NCCL as a number": ({"nccl": {"NCCL_IB_TIMEOUT": 22}}, "/nccl/NCCL_IB_TIMEOUT"),
    "claim's size": ({"storage": {"pvc": {"size": "much"}}}, "/storage/pvc/size"),
    "access mode": ({"storage": {"pvc": {"accessModes": ["RWX"]}}}, "/storage/pvc/accessModes/0"),
    "mount path": ({"storage": {"pvc": {"mountPath": "runs"}}}, "/storage/pvc/mountPath"),
    "bucket": ({"storage": {"objectStore": {"url": "bucket/runs"}}}, "/storage/objectStore/url"),
    "password in a URL": (
        {"storage": {"objectStore": {"url": "s3://key:secret@bucket/runs"}}},
        "/storage/objectStore/url",
    ),
    "root": ({"security": {"runAsUser": 0}}, "/security/runAsUser"),
    "no operator peers": ({"networkPolicy": {"operatorFrom": []}}, "/networkPolicy/operatorFrom"),
    "unrestricted scraping": (
        {"networkPolicy": {"metricsFrom": [{}]}},
        "/networkPolicy/metricsFrom/0",
    ),
    "share of workers": (
        {"podDisruptionBudget": {"minAvailableWorkers": "50%"}},
        "/podDisruptionBudget/minAvailableWorkers",
    ),
    "port": ({"metrics": {"port": 80}}, "/metrics/port"),
    "no ports": ({"metrics": {"ports": 0}}, "/metrics/ports"),
    "interval": ({"metrics": {"podMonitor": {"interval": "15"}}}, "/metrics/podMonitor/interval"),
    "alert": (
        {"metrics": {"prometheusRule": {"alerts": {"RayzeroSlow": {}}}}},
        "RayzeroSlow",
    ),
    "alert's threshold": (
        {"metrics": {"prometheusRule": {"alerts": {"RayzeroStraggler": {"threshold": "2x"}}}}},
        "/metrics/prometheusRule/alerts/RayzeroStraggler/threshold",
    ),
    "threshold of an alert without one": (
        {"metrics": {"prometheusRule": {"alerts": {"RayzeroJobFailed": {"threshold": 1}}}}},
        "/metrics/prometheusRule/alerts/RayzeroJobFailed",
    ),
    "alert's duration": (
        {"metrics": {"prometheusRule": {"alerts": {"RayzeroStraggler": {"for": "10"}}}}},
        "/metrics/prometheusRule/alerts/RayzeroStraggler/for",
    ),
    "runbook URL": (
        {"metrics": {"prometheusRule": {"runbookUrl": "docs/operations.md"}}},
        "/metrics/prometheusRule/runbookUrl",
    ),
    "queue": ({"kueue": {"queueName": "My Queue"}}, "/kueue/queueName"),
    "label": ({"commonLabels": {"team": "a b"}}, "/commonLabels/team"),
}


@pytest.mark.parametrize(("values", "path"), SCHEMA_VIOLATIONS.values(), ids=SCHEMA_VIOLATIONS)
def test_schema_rejects_invalid_values(values: dict[str, Any], path: str) -> None:
    with pytest.raises(helm_python.HelmValuesError) as caught:
        render_text(values)
    text = str(caught.value)
    assert path in text
    assert re.search("value must be|, want |does not match pattern|missing propert", text), text
    assert not re.search("anyOf|'not' failed|false schema|'(enum|const)' failed", text), text


@pytest.mark.parametrize(
    "workers",
    [
        {"resources": {key: {GPU: None} for key in BOTH}, "rayStartParams": {"num-gpus": "2"}},
        {"resources": {"requests": {GPU: 2}, "limits": {"cpu": None, GPU: 2}}},
    ],
)
def test_room_for_workers_is_what_kuberay_tells_ray(workers: dict[str, Any]) -> None:
    """A resource claim's GPUs are in rayStartParams; without a limit CPUs are the request's."""
    assert render({"job": {"spec": {"workers": {"min": 8}}}, "workers": workers})


def test_global_values_are_accepted() -> None:
    assert render({"global": {"anything": 1}})
