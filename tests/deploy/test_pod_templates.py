"""`podTemplate` is merged into the pods by one rule; labels and code that KubeRay's pods get."""

from __future__ import annotations

from typing import Any

import yaml

from tests.deploy.chart import Object, cluster_spec, find_pod, objects_of_kind, pods, render
from tests.deploy.chart import render_scenario as rendered

OVERRIDES: dict[str, Any] = yaml.safe_load("""
metadata: {annotations: {a: b}}
spec:
  runtimeClassName: nvidia
  schedulerName: mine
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  enableServiceLinks: null
  securityContext: {runAsUser: null, supplementalGroups: [44]}
  resourceClaims: [{name: gpus, resourceClaimTemplateName: gpu}]
  tolerations: [{key: second, operator: Exists}]
  initContainers: [{name: first, image: tool, restartPolicy: Always}]
  containers:
  - name: ray-worker
    securityContext: {runAsNonRoot: false, capabilities: {add: [IPC_LOCK]}}
    resources: {claims: [{name: gpus}]}
    volumeMounts:
    - {name: shared-mem, mountPath: /dev/shm, subPath: a}
    - {name: tmp, mountPath: /second}
    env: [{name: HOME, value: /work}]
  - {name: sidecar, image: tool, securityContext: {readOnlyRootFilesystem: null, runAsUser: 7}}
  volumes:
  - {name: tmp, emptyDir: null, hostPath: {path: /nvme}}
  - {name: data, nfs: {server: nfs, path: /data}}
""")
SUBMITTER: dict[str, Any] = yaml.safe_load("""
labels: {a: b}
annotations: {c: d}
nodeSelector: {pool: cpu}
tolerations: [{key: cpu, operator: Exists}]
affinity: {nodeAffinity: {}}
priorityClassName: high
resources: {limits: {memory: 2Gi}}
podTemplate:
  metadata: {annotations: {e: f}}
  spec:
    imagePullSecrets: [{name: mine}]
    securityContext: {supplementalGroups: [7]}
    terminationGracePeriodSeconds: 5
    containers:
    - {name: ray-job-submitter, securityContext: {runAsUser: 7}}
    - {name: sidecar, image: tool}
""")


def worker(values: Object) -> Object:
    return find_pod(render({"workers": values}), "worker")


def by_name(items: list[Object], key: str = "name") -> dict[str, Object]:
    assert len({item[key] for item in items}) == len(items)
    return {item[key]: item for item in items}


def test_pod_template_is_merged() -> None:
    taint = {"key": "first", "operator": "Exists"}
    before, after = worker({}), worker({"podTemplate": OVERRIDES, "tolerations": [taint]})
    old, new = before["spec"], after["spec"]
    assert after["metadata"] == before["metadata"] | {"annotations": {"a": "b"}}
    assert new["runtimeClassName"] == "nvidia"
    assert (new["schedulerName"], new["hostNetwork"]) == ("mine", True)
    assert "enableServiceLinks" in old
    assert "enableServiceLinks" not in new, "null removes a key"
    assert "runAsUser" not in new["securityContext"]
    assert new["securityContext"]["fsGroup"] == old["securityContext"]["fsGroup"]
    assert new["tolerations"] == [taint, *OVERRIDES["spec"]["tolerations"]]
    volumes, old_volumes = by_name(new["volumes"]), by_name(old["volumes"])
    assert volumes["tmp"] == {"name": "tmp", "hostPath": {"path": "/nvme"}}
    assert volumes.keys() - old_volumes.keys() == {"data"}
    ray, old_ray = new["containers"][0], old["containers"][0]
    assert ray["name"] == "ray-worker", "KubeRay's Ray container is the first"
    assert ray["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    assert ray["resources"] == old_ray["resources"] | {"claims": [{"name": "gpus"}]}
    mounts, old_mounts = (by_name(c["volumeMounts"], "mountPath") for c in (ray, old_ray))
    assert mounts["/dev/shm"] == old_mounts["/dev/shm"] | {"subPath": "a"}
    assert mounts.keys() - old_mounts.keys() == {"/second"}
    environment = by_name(ray["env"])
    assert environment["HOME"]["value"] == "/work"
    assert len(environment) == len(old_ray["env"])
    # New containers are locked down unless they say otherwise.
    locked = old_ray["securityContext"]
    assert new["initContainers"][0]["securityContext"] == locked
    expected = locked | {"runAsUser": 7}
    del expected["readOnlyRootFilesystem"]
    assert new["containers"][1]["securityContext"] == expected


def test_group_adds_to_pod_template_of_workers() -> None:
    """Null removes a key, an empty list and texts replace."""
    drop: Object = {"name": "ray-worker", "securityContext": {"capabilities": {"drop": []}}}
    changed = {"schedulerName": None, "hostname": "x", "tolerations": [], "containers": [drop]}
    groups = [{"name": "a", "podTemplate": {"spec": changed}}, {"name": "b"}]
    values = {"workers": {"podTemplate": OVERRIDES}, "workerGroups": groups}
    first, second = (
        it["template"]["spec"] for it in cluster_spec(render(values))["workerGroupSpecs"]
    )
    assert (first["hostname"], second["schedulerName"]) == ("x", "mine")
    assert "schedulerName" not in first
    assert first["tolerations"] == []
    assert first["containers"][0]["securityContext"]["capabilities"]["drop"] == []
    assert first["containers"][1:] == second["containers"][1:]


def submitter(values: Object, **others: Any) -> Object:
    return find_pod(render({"job": {"submitter": values}} | others), "submitter")


def test_submitter_has_a_pod_like_the_others() -> None:
    before = submitter({})["spec"]
    after = submitter(SUBMITTER, imagePullSecrets=[{"name": "registry"}])
    spec = after["spec"]
    assert after["metadata"]["labels"]["a"] == "b"
    assert after["metadata"]["annotations"] == {"c": "d", "e": "f"}
    for key in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert spec[key] == SUBMITTER[key]
    assert spec["imagePullSecrets"] == [{"name": "registry"}, {"name": "mine"}]
    assert spec["terminationGracePeriodSeconds"] == 5
    assert spec["securityContext"] == before["securityContext"] | {"supplementalGroups": [7]}
    (old,), (container, sidecar) = before["containers"], spec["containers"]
    assert container["securityContext"] == old["securityContext"] | {"runAsUser": 7}
    assert container["resources"]["limits"] == {"cpu": "1", "memory": "2Gi"}
    assert sidecar["securityContext"] == old["securityContext"]
    # It runs on nodes like the head's unless it says otherwise.
    taint = {"key": "head", "operator": "Exists"}
    head = {"nodeSelector": {"pool": "head"}, "tolerations": [taint]}
    for own in ({}, {"nodeSelector": {"pool": "cpu"}}):
        spec = submitter(own, head=head)["spec"]
        expected = ((own or head)["nodeSelector"], [taint])
        assert (spec["nodeSelector"], spec["tolerations"]) == expected


def test_labels_and_annotations_of_all_reach_every_pod() -> None:
    """A pod's own win over them."""
    common = {"commonLabels": {"team": "a"}, "commonAnnotations": {"contact": "b"}}
    found = [pod["metadata"] for pod in pods(render(common))]
    assert len(found) == 4
    assert {metadata["labels"]["team"] for metadata in found} == {"a"}
    assert {metadata["annotations"]["contact"] for metadata in found} == {"b"}
    own = {"labels": {"team": "c"}, "annotations": {"contact": "d", "e": "f"}}
    worker_pod = find_pod(render({"workers": own} | common), "worker")["metadata"]
    assert worker_pod["labels"]["team"] == "c"
    assert worker_pod["annotations"] == own["annotations"]


def test_extra_objects_are_templates_with_labels() -> None:
    extra = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "{{ .Release.Name }}-x", "labels": {"a": "b"}},
    }
    objects = render({"extraObjects": [extra, extra | {"metadata": {"name": "second"}}]})
    found = by_name([item["metadata"] for item in objects_of_kind(objects, "ConfigMap")])
    assert {"demo-x", "second"} <= found.keys()
    assert found["demo-x"]["namespace"] == "team"
    expected = {"a": "b", "app.kubernetes.io/instance": "demo"}
    assert found["demo-x"]["labels"].items() > expected.items()


def test_labels_and_annotations_of_queues_and_gangs() -> None:
    """As KubeRay's batch schedulers and Kueue read them."""
    metadata = {
        name: objects_of_kind(rendered(name), "RayJob")[0]["metadata"]
        for name in ("volcano", "yunikorn", "kueue-elastic", "default")
    }
    expected = {
        "ray.io/scheduler-name": "volcano",
        "volcano.sh/queue-name": "training",
        "ray.io/priority-class-name": "training",
    }
    assert metadata["volcano"]["labels"].items() > expected.items()
    yunikorn = metadata["yunikorn"]["labels"]
    assert yunikorn["ray.io/gang-scheduling-enabled"] == "true"
    assert yunikorn["yunikorn.apache.org/queue"] == "root.training"
    other = objects_of_kind(render({"gang": {"scheduler": "yunikorn"}}, namespace="b"), "RayJob")[0]
    application = "yunikorn.apache.org/app-id"
    assert other["metadata"]["labels"][application] != yunikorn[application], "not unique"
    assert len(yunikorn[application]) <= 63
    elastic = metadata["kueue-elastic"]
    assert elastic["annotations"] == {"kueue.x-k8s.io/elastic-job": "true"}
    assert elastic["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    assert cluster_spec(rendered("kueue-elastic"))["enableInTreeAutoscaling"] is True
    assert not [key for key in metadata["default"]["labels"] if "ray.io" in key]


def test_code_of_a_commit_is_in_every_pod() -> None:
    for role in ("head", "worker"):
        spec = find_pod(rendered("git"), role)["spec"]
        (sync,) = spec["initContainers"]
        assert "--one-time" in sync["args"]
        root = next(a.removeprefix("--root=") for a in sync["args"] if a.startswith("--root="))
        link = next(a.removeprefix("--link=") for a in sync["args"] if a.startswith("--link="))
        assert by_name(sync["volumeMounts"], "mountPath")[root]["name"] == "code"
        ray = spec["containers"][0]
        assert by_name(ray["volumeMounts"], "mountPath")[root]["readOnly"] is True
        path = by_name(ray["env"])["PYTHONPATH"]["value"]
        assert path.split(":") == [f"{root}/{link}/src", "/app"]
