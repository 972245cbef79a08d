"""References between rendered objects (labels, ports, mounts, times) and pod security."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayzero.orchestrator.job_file import load_job
from tests.deploy.chart import (
    SCENARIOS,
    WITH_SCENARIOS,
    Object,
    cluster_spec,
    find_pod,
    objects_of_kind,
    pods,
    render,
    render_scenario,
    render_text,
    scenario_values,
    select_pods,
)
from tests.house.source import ROOT

JOBS = tuple(name for name in SCENARIOS if scenario_values(name).get("mode") != "cluster")
ROOTS = {
    "infiniband": {"IPC_LOCK"},
    "gke-tcpx": {"IPC_LOCK", "NET_ADMIN"},
    "gke-tcpxo": {"IPC_LOCK", "NET_ADMIN", "NET_BIND_SERVICE"},
}
"""Scenarios whose pods of the cluster run as root, and the capabilities that they add."""
HOST_PATHS = ("gke-rdma", "gke-tcpx", "gke-tcpxo")
GOOGLES = ("tcpx-daemon", "tcpxo-daemon")
WITH_JOBS = pytest.mark.parametrize("scenario", JOBS)


def containers(scenario: str) -> Iterator[Object]:
    """Every container of every pod, and the options of the autoscaler container."""
    for pod in pods(render_scenario(scenario)):
        yield from pod["spec"]["containers"]
        yield from pod["spec"].get("initContainers", ())
    options = cluster_spec(render_scenario(scenario)).get("autoscalerOptions")
    if options:
        yield options


@WITH_SCENARIOS
def test_containers_are_restricted(scenario: str) -> None:
    all_containers = list(containers(scenario))
    assert len(all_containers) >= 3
    for container in all_containers:
        security = container["securityContext"]
        assert security["runAsNonRoot"] is True or scenario in ROOTS
        assert security["privileged"] is False
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is (container.get("name") not in GOOGLES)
        added = set(security["capabilities"].get("add", ()))
        assert added <= ROOTS.get(scenario, set())
        assert security["capabilities"]["drop"] == ["ALL"] or container["name"] in GOOGLES
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "memory" in container["resources"]["limits"]
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()


@WITH_SCENARIOS
def test_pods_are_restricted(scenario: str) -> None:
    for pod in pods(render_scenario(scenario)):
        spec = pod["spec"]
        security = spec["securityContext"]
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        if scenario not in ROOTS:
            assert security["runAsNonRoot"] is True
            assert security.get("runAsUser") != 0
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        paths = [volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume]
        assert not paths or scenario in HOST_PATHS
        autoscales = cluster_spec(render_scenario(scenario))["enableInTreeAutoscaling"]
        is_head = pod["metadata"]["labels"]["app.kubernetes.io/component"] == "head"
        assert spec["automountServiceAccountToken"] is (is_head and autoscales)


def test_uid_can_be_left_to_cluster() -> None:
    for pod in pods(render_scenario("locked-down")):
        assert pod["spec"]["securityContext"].keys() == {"runAsNonRoot", "seccompProfile"}


@WITH_SCENARIOS
def test_writable_paths_are_volumes(scenario: str) -> None:
    for pod in pods(render_scenario(scenario)):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert len(volumes) == len(pod["spec"]["volumes"])
        for container in pod["spec"]["containers"]:
            if container["name"] in GOOGLES:
                continue
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            assert len(mounts) == len(container["volumeMounts"])
            assert {mount["name"] for mount in mounts.values()} <= volumes.keys()
            assert "emptyDir" in volumes[mounts["/tmp"]["name"]]
            assert container.get("workingDir", "/tmp") in mounts
            environment = {entry["name"]: entry.get("value") for entry in container["env"]}
            assert environment["HOME"] in mounts
            assert len(environment) == len(container["env"])
    for role in ("head", "worker"):
        pod = find_pod(render_scenario(scenario), role)
        (shm,) = [v for v in pod["spec"]["volumes"] if v["name"] == "shared-mem"]
        assert shm["emptyDir"]["medium"] == "Memory"
        assert "/dev/shm" in {m["mountPath"] for m in pod["spec"]["containers"][0]["volumeMounts"]}


@WITH_SCENARIOS
def test_referenced_objects_exist(scenario: str) -> None:
    objects = render_scenario(scenario)
    keys = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(set(keys)) == len(keys)
    namespaced = [item["metadata"] for item in objects if item["kind"] != "PersistentVolume"]
    assert {metadata["namespace"] for metadata in namespaced} == {"team"}
    accounts = object_names(objects, "ServiceAccount")
    claims = object_names(objects, "PersistentVolumeClaim")
    config_maps = object_names(objects, "ConfigMap")
    for pod in pods(objects):
        assert pod["spec"]["serviceAccountName"] in accounts
        for volume in pod["spec"]["volumes"]:
            if "persistentVolumeClaim" in volume and scenario != "locked-down":
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            if "configMap" in volume:
                assert volume["configMap"]["name"] in config_maps
    for binding in objects_of_kind(objects, "RoleBinding"):
        assert binding["roleRef"]["name"] in object_names(objects, "Role")
        head = find_pod(objects, "head")["spec"]["serviceAccountName"]
        accounts_or_groups = [subject["name"] for subject in binding["subjects"]]
        assert accounts_or_groups in ([head], ["language-team"])


def object_names(objects: tuple[Object, ...], kind: str) -> set[str]:
    return {item["metadata"]["name"] for item in objects_of_kind(objects, kind)}


@WITH_SCENARIOS
def test_disruption_budgets(scenario: str) -> None:
    budgets = {
        item["metadata"]["name"].rpartition("-")[2]: item["spec"]
        for item in objects_of_kind(render_scenario(scenario), "PodDisruptionBudget")
    }
    assert budgets.keys() == (set() if scenario == "cpu-dev" else {"head", "worker"})
    for component, budget in budgets.items():
        labels = [pod["metadata"]["labels"] for pod in select_pods(scenario, budget["selector"])]
        assert {pod_labels["app.kubernetes.io/component"] for pod_labels in labels} == {component}
        assert isinstance(budget["minAvailable"], int)
    if budgets:
        groups = cluster_spec(render_scenario(scenario))["workerGroupSpecs"]
        assert budgets["worker"]["minAvailable"] <= sum(group["minReplicas"] for group in groups)


@WITH_JOBS
def test_job_file_is_valid_and_matches_head_container(scenario: str, tmp_path: Path) -> None:
    for name, text in job_config_map(scenario).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    spec = load_job(tmp_path / "job.yaml")
    head = find_pod(render_scenario(scenario), "head")["spec"]["containers"][0]
    (metrics_port,) = [p["containerPort"] for p in head["ports"] if p["name"] == "rayzero-metrics"]
    assert spec.metrics.port == metrics_port
    if not spec.checkpoint.is_url:
        mounts = [mount["mountPath"] for mount in head["volumeMounts"]]
        assert any(Path(spec.checkpoint.path).is_relative_to(mount) for mount in mounts[3:])


def job_config_map(scenario: str) -> Object:
    """The data of the config map with the job file."""
    config_maps = objects_of_kind(render_scenario(scenario), "ConfigMap")
    (data,) = [item["data"] for item in config_maps if "job.yaml" in item["data"]]
    return data


def test_script_takes_the_place_of_the_example(tmp_path: Path) -> None:
    launch = {"script": "/app/train.py", "args": ["--epochs", 3]}
    texts = render_text({"job": {"spec": {"name": "script", "launch": launch}}})
    (tmp_path / "job.yaml").write_text(
        yaml.safe_load(texts["templates/job.yaml"])["data"]["job.yaml"], encoding="utf-8"
    )
    spec = load_job(tmp_path / "job.yaml")
    assert spec.launch is not None
    assert (spec.launch.script, spec.launch.args) == ("/app/train.py", ["--epochs", "3"])
    assert (spec.args, spec.steps, spec.engine) == ({}, None, None)


def test_numbers_in_job_file_keep_type_and_value(tmp_path: Path) -> None:
    args = {"small": 1e-7, "large": 123456789012, "text": "1e3", "flag": True, "none": None}
    texts = render_text({"job": {"spec": {"args": args, "steps": 20000000}}})
    data = yaml.safe_load(texts["templates/job.yaml"])["data"]
    for name, text in data.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    spec = load_job(tmp_path / "job.yaml")
    assert spec.steps == 20000000
    assert {key: spec.args[key] for key in args if args[key] is not None} == {
        key: value for key, value in args.items() if value is not None
    }


@WITH_JOBS
def test_pod_termination_leaves_time_for_last_checkpoint(scenario: str) -> None:
    objects = render_scenario(scenario)
    job = json.loads(job_config_map(scenario)["job.yaml"])
    grace_period_s = job["checkpoint"]["grace_period_s"]
    for role in ("head", "worker"):
        spec = find_pod(objects, role)["spec"]
        assert spec["terminationGracePeriodSeconds"] > grace_period_s
    pre_stop = {
        role: find_pod(objects, role)["spec"]["containers"][0]["lifecycle"]["preStop"]
        for role in ("head", "worker")
    }
    worker_command = pre_stop["worker"]["exec"]["command"]
    assert worker_command == ["python", "-m", "rayzero.workers.prestop", str(grace_period_s)]
    *module, limit_s = pre_stop["head"]["exec"]["command"]
    assert module == ["python", "-m", "rayzero.orchestrator.job.prestop"]
    grace_s = find_pod(objects, "head")["spec"]["terminationGracePeriodSeconds"]
    assert grace_period_s < int(limit_s) < grace_s


@WITH_SCENARIOS
def test_lost_node_is_detected_in_seconds(scenario: str) -> None:
    for role in ("head", "worker"):
        container = find_pod(render_scenario(scenario), role)["spec"]["containers"][0]
        env = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
        check_ms = int(env["RAY_health_check_period_ms"]) + int(env["RAY_health_check_timeout_ms"])
        detection_ms = int(env["RAY_health_check_initial_delay_ms"]) + check_ms * int(
            env["RAY_health_check_failure_threshold"]
        )
        assert detection_ms <= 10_000
        assert int(env["RAY_grpc_client_keepalive_time_ms"]) <= 10_000


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    else:
        yield str(value)


@WITH_SCENARIOS
def test_credentials_are_references_to_secrets(scenario: str) -> None:
    objects = render_scenario(scenario)
    assert objects_of_kind(objects, "Secret") == []
    for container in containers(scenario):
        for entry in container.get("env", ()):
            if any(word in entry["name"].upper() for word in ("SECRET", "PASSWORD", "TOKEN")):
                assert "value" not in entry


def test_values_become_secret_references() -> None:
    by_name = {"s3": "training-bucket", "locked-down": "ray-token"}
    for scenario, name in by_name.items():
        assert name in set(strings(list(render_scenario(scenario))))
    options = cluster_spec(render_scenario("locked-down"))["gcsFaultToleranceOptions"]
    assert options["redisPassword"] == {
        "valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}
    }
    for role in ("head", "worker"):
        (container,) = find_pod(render_scenario("s3"), role)["spec"]["containers"]
        assert {"secretRef": {"name": "training-bucket"}} in container["envFrom"]


def test_queued_job_meets_kueue_requirements() -> None:
    (job,) = objects_of_kind(render_scenario("kueue"), "RayJob")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    assert cluster_spec(render_scenario("kueue"))["enableInTreeAutoscaling"] is False


def test_worker_groups_inherit_worker_values() -> None:
    steady, spot = cluster_spec(render_scenario("spot"))["workerGroupSpecs"]
    assert (steady["minReplicas"], steady["maxReplicas"]) == (2, 2)
    assert (spot["minReplicas"], spot["maxReplicas"], spot["idleTimeoutSeconds"]) == (0, 14, 60)
    assert "nodeSelector" not in steady["template"]["spec"]
    assert len(spot["template"]["spec"]["tolerations"]) == 2
    assert (
        steady["template"]["spec"]["containers"][0]["resources"]
        == spot["template"]["spec"]["containers"][0]["resources"]
    )
    group: Object = {
        "name": "cpu",
        "shmSize": "500Mi",
        "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}},
    }
    (cpu_group,) = cluster_spec(
        render({"workerGroups": [group], "job": {"spec": {"workers": {"gpus": 0}}}})
    )["workerGroupSpecs"]
    resources = cpu_group["template"]["spec"]["containers"][0]["resources"]
    assert resources == {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}}


def test_head_ray_start_params_override_defaults() -> None:
    params = {"num-cpus": "1", "object-store-memory": "1000000000"}
    head_group = cluster_spec(render({"head": {"rayStartParams": params}}))["headGroupSpec"]
    assert head_group["rayStartParams"] == {"dashboard-host": "0.0.0.0", **params}


def test_gpu_pods_run_on_nodes_with_the_least_driver() -> None:
    """As the guide has it for the image's CUDA."""
    spec = find_pod(render_scenario("gpu"), "worker")["spec"]
    cuda = re.search(r":\S+-cu(\d\d)\d$", spec["containers"][0]["image"])
    assert cuda is not None
    guide = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    least = re.search(rf"(\d+) for CUDA {cuda[1]}\b", guide)
    assert least is not None
    node = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = node["nodeSelectorTerms"][0]["matchExpressions"]
    assert (term["key"], term["operator"]) == ("nvidia.com/cuda.driver-version.major", "Gt")
    assert term["values"] == [str(int(least[1]) - 1)]


@WITH_SCENARIOS
def test_autoscaler_volumes_exist_on_head(scenario: str) -> None:
    mounts = (
        cluster_spec(render_scenario(scenario)).get("autoscalerOptions", {}).get("volumeMounts", [])
    )
    volumes = find_pod(render_scenario(scenario), "head")["spec"]["volumes"]
    assert {mount["name"] for mount in mounts} <= {volume["name"] for volume in volumes}


def test_job_suffix_is_part_of_its_name() -> None:
    (job,) = objects_of_kind(render({"job": {"suffix": "2"}}), "RayJob")
    assert job["metadata"]["name"] == "demo-rayzero-2"
    objects = render({"job": {"suffix": "2"}, "fullnameOverride": "a" * 40})
    assert objects_of_kind(objects, "RayJob")[0]["metadata"]["name"] == "a" * 38 + "-2"


@WITH_SCENARIOS
def test_notes_are_complete(scenario: str) -> None:
    notes = render_text(scenario_values(scenario))["templates/NOTES.txt"]
    assert "kubectl -n team" in notes
    assert "<no value>" not in notes
    assert "WARNING" not in notes


def test_notes_warn_of_disabled_security() -> None:
    values = {"auth": {"enabled": False}, "networkPolicy": {"enabled": False}}
    assert render_text(values)["templates/NOTES.txt"].count("WARNING") == 2
