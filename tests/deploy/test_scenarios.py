"""Every rendered object: Helm, Kubernetes and KubeRay accept it, pods are restricted, and what
objects say of each other (labels, ports, mounts, times) is there. For each scenario."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import pytest

from rayzero.orchestrator.cluster.ray_api import CONTROLLER_RESOURCE
from rayzero.orchestrator.job_file import load_job
from tests.deploy.chart import (
    CHART,
    SCENARIOS,
    WITH_SCENARIOS,
    Object,
    cases,
    cluster_spec,
    container_of,
    find_pod,
    job_files,
    objects_of_kind,
    pods,
    ports_of,
    render,
    render_scenario,
    scenario_texts,
    scenario_values,
    select_pods,
)
from tests.deploy.operator import operator_errors
from tests.deploy.schemas import KUBERNETES, is_built_in, skip_without_crds, validate

OLDEST = {"dra": "1.34"}
"""The first version of Kubernetes that has a scenario's kinds, where not all have them."""
VALUES = cases("valid")
WITH_INPUTS = pytest.mark.parametrize("name", [*SCENARIOS, *VALUES])
JOBS = tuple(name for name in SCENARIOS if scenario_values(name).get("mode") != "cluster")
ROOTS = {
    "infiniband": {"IPC_LOCK"},
    "gke-tcpx": {"IPC_LOCK", "NET_ADMIN"},
    "gke-tcpxo": {"IPC_LOCK", "NET_ADMIN", "NET_BIND_SERVICE"},
}
"""Scenarios whose pods of the cluster run as root, and the capabilities that they add."""
HOST_PATHS = ("gke-rdma", "gke-tcpx", "gke-tcpxo")
GOOGLES = ("tcpx-daemon", "tcpxo-daemon")
ROLES = ("head", "worker")
COMPONENT = "app.kubernetes.io/component"


@cache
def rendered(name: str) -> tuple[Object, ...]:
    return render_scenario(name) if name in SCENARIOS else tuple(render(VALUES[name]))


@WITH_INPUTS
def test_operator_and_custom_resources(name: str) -> None:
    assert [text for item in rendered(name) for text in operator_errors(item)] == []
    skip_without_crds()
    resources = [item for item in rendered(name) if not is_built_in(item)]
    assert resources
    assert [error for item in resources for error in validate(item, "")] == []


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


@pytest.mark.parametrize("version", KUBERNETES)
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


@pytest.mark.parametrize(
    ("scenario", "version"),
    [("default", KUBERNETES[0]), ("cluster", KUBERNETES[-1]), ("locked-down", KUBERNETES[-1])],
)
def test_helm_lint_passes(scenario: str, version: str) -> None:
    """No template depends on the version: the schemas find kinds that one does not have."""
    report = helm_python.lint(
        str(CHART), scenario_values(scenario), strict=True, kube_version=f"v{version}.0"
    )
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


def test_invalid_objects_are_detected() -> None:
    """An unknown field in each kind, a violated CEL rule, invalid values, and a failure policy: if
    RayJob gets one, the chart can retry by exit code."""
    skip_without_crds()
    for item in [*render_scenario("gpu"), *render_scenario("cluster")]:
        invalid = deepcopy(item)
        spec = invalid.get("spec") if item["kind"] not in ("Role",) else invalid
        (spec if spec is not None else invalid)["misspelled"] = 1
        assert validate(invalid, "1.32"), item["kind"]
    (job,) = objects_of_kind(render_scenario("default"), "RayJob")
    for change, part in [
        ({"deletionStrategy": {"onSuccess": {"policy": "DeleteSelf"}}}, "onSuccess and onFailure"),
        ({"deletionStrategy": {"onSuccess": {"policy": "DeleteAll"}}}, "DeleteAll"),
        ({"podFailurePolicy": {"rules": []}}, "podFailurePolicy"),
        ({"submitterConfig": {"podFailurePolicy": {"rules": []}}}, "podFailurePolicy"),
    ]:
        assert part in validate(job | {"spec": job["spec"] | change}, KUBERNETES[-1])[0]
    job = deepcopy(job)
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    head["containers"][0]["resource"] = {}
    assert "resource" in validate(job, "1.32")[0]


def containers(scenario: str) -> Iterator[Object]:
    """Every container of every pod, and the options of the autoscaler container."""
    for pod in pods(render_scenario(scenario)):
        yield from pod["spec"]["containers"]
        yield from pod["spec"].get("initContainers", ())
    options = cluster_spec(render_scenario(scenario)).get("autoscalerOptions")
    if options:
        yield options


@WITH_SCENARIOS
def test_pods_and_containers_are_restricted(scenario: str) -> None:
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
    for pod in pods(render_scenario(scenario)):
        spec, security = pod["spec"], pod["spec"]["securityContext"]
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        if scenario not in ROOTS:
            assert security["runAsNonRoot"] is True
            assert security.get("runAsUser") != 0
        if scenario == "locked-down":  # which leaves the uid to the cluster
            assert security.keys() == {"runAsNonRoot", "seccompProfile"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        paths = [volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume]
        assert not paths or scenario in HOST_PATHS
        autoscales = cluster_spec(render_scenario(scenario))["enableInTreeAutoscaling"]
        is_head = pod["metadata"]["labels"][COMPONENT] == "head"
        assert spec["automountServiceAccountToken"] is (is_head and autoscales)


@WITH_SCENARIOS
def test_volumes_and_environment(scenario: str) -> None:
    """Writable paths are volumes, credentials come from secrets, and Ray notices a lost node."""
    objects = render_scenario(scenario)
    for pod in pods(objects):
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
            for word in ("SECRET", "PASSWORD", "TOKEN"):
                assert not [it for it, value in environment.items() if word in it and value]
    for role in ROLES:
        (shm,) = [
            v for v in find_pod(objects, role)["spec"]["volumes"] if v["name"] == "shared-mem"
        ]
        assert shm["emptyDir"]["medium"] == "Memory"
        container = container_of(objects, role)
        assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}
        env = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
        check_ms = int(env["RAY_health_check_period_ms"]) + int(env["RAY_health_check_timeout_ms"])
        failures = int(env["RAY_health_check_failure_threshold"])
        detection_ms = int(env["RAY_health_check_initial_delay_ms"]) + check_ms * failures
        assert max(detection_ms, int(env["RAY_grpc_client_keepalive_time_ms"])) <= 10_000
    options = cluster_spec(objects).get("autoscalerOptions", {})
    volumes = {volume["name"] for volume in find_pod(objects, "head")["spec"]["volumes"]}
    assert {mount["name"] for mount in options.get("volumeMounts", ())} <= volumes


@WITH_SCENARIOS
def test_referenced_objects_exist(scenario: str) -> None:
    objects = render_scenario(scenario)
    keys = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(set(keys)) == len(keys)
    assert objects_of_kind(objects, "Secret") == []
    namespaced = [item["metadata"] for item in objects if item["kind"] != "PersistentVolume"]
    assert {metadata["namespace"] for metadata in namespaced} == {"team"}
    for pod in pods(objects):
        assert ("ServiceAccount", pod["spec"]["serviceAccountName"]) in keys
        for volume in pod["spec"]["volumes"]:
            claim, config_map = volume.get("persistentVolumeClaim"), volume.get("configMap")
            if claim and scenario != "locked-down":
                assert ("PersistentVolumeClaim", claim["claimName"]) in keys
            assert not config_map or ("ConfigMap", config_map["name"]) in keys
    for binding in objects_of_kind(objects, "RoleBinding"):
        assert ("Role", binding["roleRef"]["name"]) in keys
        head = find_pod(objects, "head")["spec"]["serviceAccountName"]
        accounts_or_groups = [subject["name"] for subject in binding["subjects"]]
        assert accounts_or_groups in ([head], ["language-team"])
    budgets = {
        item["metadata"]["name"].rpartition("-")[2]: item["spec"]
        for item in objects_of_kind(objects, "PodDisruptionBudget")
    }
    components = {*ROLES, *["controller"] * has_controller(objects)}
    assert budgets.keys() == (set() if scenario == "cpu-dev" else components)
    for component, budget in budgets.items():
        selected = select_pods(scenario, budget["selector"])
        assert {pod["metadata"]["labels"][COMPONENT] for pod in selected} == {component}
        assert isinstance(budget["minAvailable"], int)
    if budgets:
        groups = cluster_spec(objects)["workerGroupSpecs"]
        assert budgets["worker"]["minAvailable"] <= sum(group["minReplicas"] for group in groups)


@WITH_SCENARIOS
def test_network_policies_and_monitors_match_pods_and_ports(scenario: str) -> None:
    objects = render_scenario(scenario)
    policies, all_pods = objects_of_kind(objects, "NetworkPolicy"), list(pods(objects))
    cluster, *others = sorted(policies, key=lambda policy: policy["metadata"]["name"])
    assert select_pods(scenario, cluster["spec"]["podSelector"]) == all_pods
    scraped = ["controller"] * has_controller(objects) + ["head"]
    for policy, role in zip(others, scraped, strict=True):
        (pod,) = select_pods(scenario, policy["spec"]["podSelector"])
        assert pod["metadata"]["labels"][COMPONENT] == role
        assert "rayzero-metrics" in ports_of([pod])
    for policy in policies:
        opened = ports_of(select_pods(scenario, policy["spec"]["podSelector"])).keys()
        for rule in policy["spec"]["ingress"]:
            assert rule["from"], "a rule without peers allows all traffic"
            assert {port["port"] for port in rule.get("ports", ())} <= opened
    (internal,) = [rule for rule in cluster["spec"]["ingress"] if "ports" not in rule]
    assert select_pods(scenario, internal["from"][0]["podSelector"]) == all_pods
    open_ports = {port["port"] for rule in others[-1]["spec"]["ingress"] for port in rule["ports"]}
    metrics = {it for it in ports_of([find_pod(objects, "head")]) if it.startswith("rayzero-")}
    assert open_ports - {"commands"} == {"dashboard", *metrics}
    monitors = objects_of_kind(objects, "PodMonitor")
    assert monitors or scenario not in ("gpu", "locked-down")
    for monitor in monitors:
        targets = select_pods(scenario, monitor["spec"]["selector"])
        assert find_pod(objects, "head") in targets
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert endpoint["port"] in ports_of(targets)
            assert endpoint["honorLabels"], "alerts and dashboard need the job's `job` label"
        assert "namespaceSelector" not in monitor["spec"], "the default is the monitor's namespace"


@pytest.mark.parametrize("scenario", JOBS)
def test_job_file_fits_the_pods(scenario: str, tmp_path: Path) -> None:
    """It is valid, and the end of a pod leaves time for the last checkpoint."""
    objects = render_scenario(scenario)
    job_files(objects, tmp_path)
    spec = load_job(tmp_path / "job.yaml")
    head = container_of(objects, "head")
    assert spec.metrics.port == ports_of([find_pod(objects, "head")])["rayzero-metrics"]
    if not spec.checkpoint.is_url:
        mounts = [mount["mountPath"] for mount in head["volumeMounts"]]
        assert any(Path(spec.checkpoint.path).is_relative_to(mount) for mount in mounts[3:])
    # As it is written: a number without a fraction is an integer there.
    job = json.loads((tmp_path / "job.yaml").read_text(encoding="utf-8"))
    before_s = job["checkpoint"]["grace_period_s"]
    of_head_s, of_worker_s = (
        find_pod(objects, role)["spec"]["terminationGracePeriodSeconds"] for role in ROLES
    )
    worker_command = container_of(objects, "worker")["lifecycle"]["preStop"]["exec"]["command"]
    assert worker_command == ["python", "-m", "rayzero.workers.prestop", str(before_s)]
    *module, limit_s = head["lifecycle"]["preStop"]["exec"]["command"][:4]
    assert module == ["python", "-m", "rayzero.orchestrator.job.prestop"]
    assert before_s < int(limit_s) < of_head_s
    assert before_s < of_worker_s


@WITH_SCENARIOS
def test_notes_are_complete(scenario: str) -> None:
    notes = scenario_texts(scenario)["templates/NOTES.txt"]
    assert "kubectl -n team" in notes
    assert "<no value>" not in notes
    assert "WARNING" not in notes


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)
    else:
        yield str(value)


def test_values_become_secret_references() -> None:
    for scenario, name in {"s3": "training-bucket", "locked-down": "ray-token"}.items():
        assert name in set(strings(render_scenario(scenario)))
    options = cluster_spec(render_scenario("locked-down"))["gcsFaultToleranceOptions"]
    assert options["redisPassword"] == {
        "valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}
    }
    assert "RAY_gcs_storage" not in env_of(render_scenario("locked-down"), "head")
    for role in ROLES:
        container = container_of(render_scenario("s3"), role)
        assert {"secretRef": {"name": "training-bucket"}} in container["envFrom"]


@pytest.mark.parametrize("size", ["2Gi", ""])
def test_head_keeps_its_state_in_files_of_its_cluster(size: str) -> None:
    """Workers wait for it as long as the job does, and its end stops a job only with theirs."""
    values = {"enabled": True, "backend": "rocksdb", "storage": {"size": size}}
    recovery = {"spec": {"recovery": {"orphan_s": 900}}}
    objects = render({"gcsFaultTolerance": values, "job": recovery})
    assert "gcsFaultToleranceOptions" not in cluster_spec(objects)
    head, worker = (env_of(objects, role) for role in ROLES)
    assert head["RAY_gcs_storage"] == {"value": "rocksdb"}
    assert head["RAY_gcs_storage_path"] == {"value": "/var/lib/ray-gcs/$(RAYZERO_CLUSTER)"}
    assert "RAY_gcs_storage" not in worker
    assert worker["RAY_gcs_rpc_server_reconnect_timeout_s"] == {"value": "900"}
    (volume,) = [it for it in find_pod(objects, "head")["spec"]["volumes"] if it["name"] == "gcs"]
    claims = [it["metadata"]["name"] for it in objects if it["kind"] == "PersistentVolumeClaim"]
    claim = (
        {"persistentVolumeClaim": {"claimName": "demo-rayzero-gcs"}} if size else {"emptyDir": {}}
    )
    assert volume == {"name": "gcs", **claim}
    assert ("demo-rayzero-gcs" in claims) == bool(size)
    hook = container_of(objects, "head")["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[-1] == "unless-workers-stay"


def test_controllers_pod_offers_its_node_to_the_jobs_processes() -> None:
    """On nodes like the head's, with the head's volumes, and as long without it as the workers."""
    spec = cluster_spec(render_scenario("locked-down"))
    (group,) = [it for it in spec["workerGroupSpecs"] if it["groupName"] == "controller"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (1, 1, 1)
    parameters = group["rayStartParams"]
    assert json.loads(json.loads(parameters["resources"])) == {CONTROLLER_RESOURCE: 1}
    assert parameters["num-cpus"] == "0"
    pods_of = [group["template"]["spec"], spec["headGroupSpec"]["template"]["spec"]]
    mounts, of_head = (it["containers"][0]["volumeMounts"] for it in pods_of)
    assert [it for it in of_head if it["name"] not in ("job", "gcs")] == mounts
    (container,) = group["template"]["spec"]["containers"]
    names = {it["name"] for it in container["env"]}
    assert "RAY_gcs_rpc_server_reconnect_timeout_s" in names


def has_controller(objects: Sequence[Object]) -> bool:
    groups = cluster_spec(objects)["workerGroupSpecs"]
    return any(group["groupName"] == "controller" for group in groups)


def env_of(objects: Sequence[Object], role: str) -> dict[str, Any]:
    """The values of a pod's variables, by name."""
    variables = container_of(objects, role)["env"]
    return {it["name"]: {key: it[key] for key in it if key != "name"} for it in variables}
