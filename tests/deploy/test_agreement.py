"""What one object says of another holds: labels, ports, mounts, times. Pods may do little."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayzero.orchestrator.job_file import load_job
from rayzero.orchestrator.spec import MetricsSpec
from tests.deploy.chart import (
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
)

JOBS = ("default", "cpu-dev", "gpu", "spot", "kueue", "s3", "locked-down")
WITH_JOBS = pytest.mark.parametrize("scenario", JOBS)
SECRET = "p4ssw0rd"


def containers(scenario: str) -> Iterator[Object]:
    """Every container of every pod; the autoscaler's, which KubeRay makes, as far as we say."""
    for pod in pods(render_scenario(scenario)):
        yield from pod["spec"]["containers"]
        yield from pod["spec"].get("initContainers", ())
    options = cluster_spec(render_scenario(scenario)).get("autoscalerOptions")
    if options:
        yield options


def matches(selector: Object, pod: Object) -> bool:
    return selector["matchLabels"].items() <= pod["metadata"]["labels"].items()


def selected(scenario: str, selector: Object) -> list[Object]:
    return [pod for pod in pods(render_scenario(scenario)) if matches(selector, pod)]


def ports(pod: Object) -> set[str]:
    return {port["name"] for one in pod["spec"]["containers"] for port in one.get("ports", ())}


@WITH_SCENARIOS
def test_containers_may_do_little(scenario: str) -> None:
    found = list(containers(scenario))
    assert len(found) >= 3
    for one in found:
        security = one["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["privileged"] is False
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "memory" in one["resources"]["limits"]
        assert {"cpu", "memory"} <= one["resources"]["requests"].keys()


@WITH_SCENARIOS
def test_pods_may_do_little(scenario: str) -> None:
    for pod in pods(render_scenario(scenario)):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["securityContext"].get("runAsUser") != 0
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume]
        autoscales = cluster_spec(render_scenario(scenario))["enableInTreeAutoscaling"]
        is_head = pod["metadata"]["labels"]["app.kubernetes.io/component"] == "head"
        assert spec["automountServiceAccountToken"] is (is_head and autoscales)


def test_a_uid_of_the_clusters_choice_is_possible() -> None:
    for pod in pods(render_scenario("locked-down")):
        assert pod["spec"]["securityContext"].keys() == {"runAsNonRoot", "seccompProfile"}


@WITH_SCENARIOS
def test_what_ray_writes_has_a_volume(scenario: str) -> None:
    for pod in pods(render_scenario(scenario)):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert len(volumes) == len(pod["spec"]["volumes"])
        for one in pod["spec"]["containers"]:
            mounts = {mount["mountPath"]: mount for mount in one["volumeMounts"]}
            assert len(mounts) == len(one["volumeMounts"])
            assert {mount["name"] for mount in mounts.values()} <= volumes.keys()
            assert "emptyDir" in volumes[mounts["/tmp"]["name"]]
            assert one.get("workingDir", "/tmp") in mounts
            environment = {entry["name"]: entry.get("value") for entry in one["env"]}
            assert environment["HOME"] in mounts
            assert len(environment) == len(one["env"])
    for role in ("head", "worker"):
        pod = find_pod(render_scenario(scenario), role)
        (shm,) = [v for v in pod["spec"]["volumes"] if v["name"] == "shared-mem"]
        assert shm["emptyDir"]["medium"] == "Memory"
        assert "/dev/shm" in {m["mountPath"] for m in pod["spec"]["containers"][0]["volumeMounts"]}


@WITH_SCENARIOS
def test_names_lead_to_objects(scenario: str) -> None:
    objects = render_scenario(scenario)
    keys = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(set(keys)) == len(keys)
    assert {one["metadata"]["namespace"] for one in objects} == {"team"}
    accounts = {one["metadata"]["name"] for one in objects_of_kind(objects, "ServiceAccount")}
    claims = {one["metadata"]["name"] for one in objects_of_kind(objects, "PersistentVolumeClaim")}
    maps = {one["metadata"]["name"] for one in objects_of_kind(objects, "ConfigMap")}
    for pod in pods(objects):
        assert pod["spec"]["serviceAccountName"] in accounts
        for volume in pod["spec"]["volumes"]:
            if "persistentVolumeClaim" in volume and scenario != "locked-down":
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps
    for binding in objects_of_kind(objects, "RoleBinding"):
        roles = {one["metadata"]["name"] for one in objects_of_kind(objects, "Role")}
        assert binding["roleRef"]["name"] in roles
        head = find_pod(objects, "head")["spec"]["serviceAccountName"]
        assert [subject["name"] for subject in binding["subjects"]] == [head]


@WITH_SCENARIOS
def test_network_policies_meet_pods_and_ports(scenario: str) -> None:
    policies = objects_of_kind(render_scenario(scenario), "NetworkPolicy")
    everybody = list(pods(render_scenario(scenario)))
    whole, head = sorted(policies, key=lambda one: one["metadata"]["name"])
    assert selected(scenario, whole["spec"]["podSelector"]) == everybody
    assert selected(scenario, head["spec"]["podSelector"]) == [
        find_pod(render_scenario(scenario), "head")
    ]
    for policy in policies:
        targets = selected(scenario, policy["spec"]["podSelector"])
        for rule in policy["spec"]["ingress"]:
            assert rule["from"], "a rule without peers lets everybody in"
            for port in rule.get("ports", ()):
                assert any(port["port"] in ports(pod) for pod in targets)
    (inside,) = [rule for rule in whole["spec"]["ingress"] if "ports" not in rule]
    assert selected(scenario, inside["from"][0]["podSelector"]) == everybody
    opened = {port["port"] for rule in head["spec"]["ingress"] for port in rule["ports"]}
    assert opened == {"dashboard", *endpoints(scenario)}


def endpoints(scenario: str) -> dict[str, int]:
    """The head's ports for jobs' metrics, by name."""
    (head,) = find_pod(render_scenario(scenario), "head")["spec"]["containers"]
    found = {one["name"]: one["containerPort"] for one in head["ports"]}
    return {name: port for name, port in found.items() if name.startswith("rayzero-")}


def test_a_cluster_has_a_port_for_each_of_its_jobs() -> None:
    """Two jobs that are told the ports as the notes say, and Prometheus at both."""
    assert list(endpoints("default").values()) == [9400]
    assert list(endpoints("cluster").values()) == list(range(9400, 9408))
    assert all(len(name) <= 15 for name in endpoints("cluster")), "or Kubernetes refuses it"
    values = {"mode": "cluster", "metrics": {"podMonitor": {"enabled": True}, "ports": 2}}
    (monitor,) = objects_of_kind(render(values), "PodMonitor")
    asked = [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]]
    assert asked == ["rayzero-metrics", "rayzero-1", "metrics"]
    notes = render_text(values)["templates/NOTES.txt"]
    told = re.search(r"^  metrics: (.*)$", notes, re.MULTILINE)
    assert told is not None
    metrics = MetricsSpec.model_validate(yaml.safe_load(told[1]))
    assert (metrics.host, metrics.port, metrics.ports) == ("0.0.0.0", 9400, 2)


def test_other_releases_are_strangers() -> None:
    (whole, *_) = objects_of_kind(render({}, release="other"), "NetworkPolicy")
    assert selected("default", whole["spec"]["podSelector"]) == []


@pytest.mark.parametrize("scenario", ["gpu", "locked-down"])
def test_the_pod_monitor_meets_pods_and_ports(scenario: str) -> None:
    (monitor,) = objects_of_kind(render_scenario(scenario), "PodMonitor")
    found = selected(scenario, monitor["spec"]["selector"])
    assert find_pod(render_scenario(scenario), "head") in found
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        assert any(endpoint["port"] in ports(pod) for pod in found)
        assert endpoint["honorLabels"], "or the label `job` is lost, which all rules ask for"
    assert "namespaceSelector" not in monitor["spec"], "its own namespace is the default"


@WITH_SCENARIOS
def test_disruption_budgets_leave_enough(scenario: str) -> None:
    budgets = {
        one["metadata"]["name"].rpartition("-")[2]: one["spec"]
        for one in objects_of_kind(render_scenario(scenario), "PodDisruptionBudget")
    }
    assert budgets.keys() == (set() if scenario == "cpu-dev" else {"head", "worker"})
    for component, budget in budgets.items():
        labels = [pod["metadata"]["labels"] for pod in selected(scenario, budget["selector"])]
        assert {one["app.kubernetes.io/component"] for one in labels} == {component}
        assert isinstance(budget["minAvailable"], int)
    if budgets:
        groups = cluster_spec(render_scenario(scenario))["workerGroupSpecs"]
        assert budgets["worker"]["minAvailable"] <= sum(one["minReplicas"] for one in groups)


@WITH_JOBS
def test_the_job_file_is_one(scenario: str, tmp_path: Path) -> None:
    """Rayzero's own loader reads what the config map holds, and finds the metrics port open."""
    (data,) = [
        one["data"]
        for one in objects_of_kind(render_scenario(scenario), "ConfigMap")
        if "job.yaml" in one["data"]
    ]
    for name, text in data.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    spec = load_job(tmp_path / "job.yaml")
    head = find_pod(render_scenario(scenario), "head")["spec"]["containers"][0]
    (opened,) = [p["containerPort"] for p in head["ports"] if p["name"] == "rayzero-metrics"]
    assert spec.metrics.port == opened
    if not spec.checkpoint.is_url:
        mounts = [mount["mountPath"] for mount in head["volumeMounts"]]
        assert any(Path(spec.checkpoint.path).is_relative_to(mount) for mount in mounts[3:])


def test_numbers_of_the_job_file_stay_numbers(tmp_path: Path) -> None:
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
def test_a_stop_has_time_for_the_last_checkpoint(scenario: str) -> None:
    objects = render_scenario(scenario)
    (data,) = [o["data"] for o in objects_of_kind(objects, "ConfigMap") if "job.yaml" in o["data"]]
    grace_period_s = json.loads(data["job.yaml"])["checkpoint"]["grace_period_s"]
    for role in ("head", "worker"):
        spec = find_pod(objects, role)["spec"]
        assert spec["terminationGracePeriodSeconds"] > grace_period_s
    told = {role: find_pod(objects, role)["spec"]["containers"][0] for role in ("head", "worker")}
    before = {role: one["lifecycle"]["preStop"]["exec"]["command"] for role, one in told.items()}
    assert before["worker"] == ["python", "-m", "rayzero.workers.prestop", str(grace_period_s)]
    *module, limit_s = before["head"]
    assert module == ["python", "-m", "rayzero.orchestrator.job.prestop"]
    grace_s = find_pod(objects, "head")["spec"]["terminationGracePeriodSeconds"]
    assert grace_period_s < int(limit_s) < grace_s


@WITH_SCENARIOS
def test_a_lost_node_is_found_in_seconds(scenario: str) -> None:
    for role in ("head", "worker"):
        (container,) = find_pod(render_scenario(scenario), role)["spec"]["containers"]
        env = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        each = int(env["RAY_health_check_period_ms"]) + int(env["RAY_health_check_timeout_ms"])
        lost_ms = int(env["RAY_health_check_initial_delay_ms"]) + each * int(
            env["RAY_health_check_failure_threshold"]
        )
        assert lost_ms <= 10_000
        assert int(env["RAY_grpc_client_keepalive_time_ms"]) <= 10_000


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from strings(one)
    else:
        yield str(value)


@WITH_SCENARIOS
def test_secrets_are_named_and_never_contained(scenario: str) -> None:
    """No Secret is made, and what looks like a credential is a reference."""
    objects = render_scenario(scenario)
    assert objects_of_kind(objects, "Secret") == []
    for one in containers(scenario):
        for entry in one.get("env", ()):
            if any(word in entry["name"].upper() for word in ("SECRET", "PASSWORD", "TOKEN")):
                assert "value" not in entry


def test_references_to_secrets_are_made() -> None:
    by_name = {"s3": "training-bucket", "locked-down": "ray-token"}
    for scenario, name in by_name.items():
        assert name in set(strings(list(render_scenario(scenario))))
    redis = cluster_spec(render_scenario("locked-down"))["gcsFaultToleranceOptions"][
        "redisPassword"
    ]
    assert redis == {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}}
    for role in ("head", "worker"):
        (container,) = find_pod(render_scenario("s3"), role)["spec"]["containers"]
        assert {"secretRef": {"name": "training-bucket"}} in container["envFrom"]


def test_a_queued_job_starts_as_kueue_wants_it() -> None:
    (job,) = objects_of_kind(render_scenario("kueue"), "RayJob")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    assert cluster_spec(render_scenario("kueue"))["enableInTreeAutoscaling"] is False


def test_groups_differ_from_the_workers_only_in_what_they_say() -> None:
    steady, spot = cluster_spec(render_scenario("spot"))["workerGroupSpecs"]
    assert (steady["minReplicas"], steady["maxReplicas"]) == (2, 2)
    assert (spot["minReplicas"], spot["maxReplicas"], spot["idleTimeoutSeconds"]) == (0, 14, 60)
    assert "nodeSelector" not in steady["template"]["spec"]
    assert len(spot["template"]["spec"]["tolerations"]) == 2
    assert (
        steady["template"]["spec"]["containers"][0]["resources"]
        == spot["template"]["spec"]["containers"][0]["resources"]
    )
    group = {"name": "cpu", "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}}}
    (other,) = cluster_spec(
        render({"workerGroups": [group], "job": {"spec": {"workers": {"gpus": 0}}}})
    )["workerGroupSpecs"]
    own = other["template"]["spec"]["containers"][0]["resources"]
    assert own == {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}}


def test_parameters_of_the_head_win() -> None:
    given = {"num-cpus": "1", "object-store-memory": "1000000000"}
    started = cluster_spec(render({"head": {"rayStartParams": given}}))["headGroupSpec"]
    assert started["rayStartParams"] == {"dashboard-host": "0.0.0.0", **given}


@WITH_SCENARIOS
def test_the_autoscaler_has_its_volumes(scenario: str) -> None:
    mounts = (
        cluster_spec(render_scenario(scenario)).get("autoscalerOptions", {}).get("volumeMounts", [])
    )
    volumes = find_pod(render_scenario(scenario), "head")["spec"]["volumes"]
    assert {mount["name"] for mount in mounts} <= {volume["name"] for volume in volumes}


def test_another_suffix_is_another_job() -> None:
    (job,) = objects_of_kind(render({"job": {"suffix": "2"}}), "RayJob")
    assert job["metadata"]["name"] == "demo-rayzero-2"
    long = render({"job": {"suffix": "2"}, "fullnameOverride": "a" * 40})
    assert objects_of_kind(long, "RayJob")[0]["metadata"]["name"] == "a" * 38 + "-2"


@WITH_SCENARIOS
def test_notes_are_told(scenario: str) -> None:
    notes = render_text(scenario_values(scenario))["templates/NOTES.txt"]
    assert "kubectl -n team" in notes
    assert "<no value>" not in notes
    assert "WARNING" not in notes


def test_notes_warn_of_open_doors() -> None:
    open_doors = {"auth": {"enabled": False}, "networkPolicy": {"enabled": False}}
    assert render_text(open_doors)["templates/NOTES.txt"].count("WARNING") == 2
