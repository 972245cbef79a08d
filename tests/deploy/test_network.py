"""Ports of the pods, and who may reach them by network policies and monitors."""

from __future__ import annotations

import re

import pytest
import yaml

from rayzero.orchestrator.job.command_server import PORT_VARIABLE
from rayzero.orchestrator.spec_sections import MetricsSpec
from tests.deploy.chart import (
    WITH_SCENARIOS,
    Object,
    find_pod,
    objects_of_kind,
    pods,
    render,
    render_scenario,
    render_text,
    select_pods,
)
from tests.house.source import ROOT


def port_names(pod: Object) -> set[str]:
    return {
        port["name"]
        for container in pod["spec"]["containers"]
        for port in container.get("ports", ())
    }


@WITH_SCENARIOS
def test_network_policies_match_pods_and_ports(scenario: str) -> None:
    policies = objects_of_kind(render_scenario(scenario), "NetworkPolicy")
    all_pods = list(pods(render_scenario(scenario)))
    cluster, head = sorted(policies, key=lambda policy: policy["metadata"]["name"])
    assert select_pods(scenario, cluster["spec"]["podSelector"]) == all_pods
    assert select_pods(scenario, head["spec"]["podSelector"]) == [
        find_pod(render_scenario(scenario), "head")
    ]
    for policy in policies:
        targets = select_pods(scenario, policy["spec"]["podSelector"])
        for rule in policy["spec"]["ingress"]:
            assert rule["from"], "a rule without peers allows all traffic"
            for port in rule.get("ports", ()):
                assert any(port["port"] in port_names(pod) for pod in targets)
    (internal,) = [rule for rule in cluster["spec"]["ingress"] if "ports" not in rule]
    assert select_pods(scenario, internal["from"][0]["podSelector"]) == all_pods
    open_ports = {port["port"] for rule in head["spec"]["ingress"] for port in rule["ports"]}
    assert open_ports - {"commands"} == {"dashboard", *metrics_ports(scenario)}


def metrics_ports(scenario: str) -> dict[str, int]:
    """The head's ports for jobs' metrics, by name."""
    (head,) = find_pod(render_scenario(scenario), "head")["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    return {name: port for name, port in ports.items() if name.startswith("rayzero-")}


def test_cluster_has_metrics_ports_for_several_jobs() -> None:
    """The pod monitor scrapes all ports, and the notes show the job file's `metrics` section."""
    assert list(metrics_ports("default").values()) == [9400]
    assert list(metrics_ports("cluster").values()) == list(range(9400, 9408))
    assert all(len(name) <= 15 for name in metrics_ports("cluster")), "limit of Kubernetes"
    values = {"mode": "cluster", "metrics": {"podMonitor": {"enabled": True}, "ports": 2}}
    (monitor,) = objects_of_kind(render(values), "PodMonitor")
    scraped = [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]]
    assert scraped == ["rayzero-metrics", "rayzero-1", "metrics"]
    notes = render_text(values)["templates/NOTES.txt"]
    section = re.search(r"^  metrics: (.*)$", notes, re.MULTILINE)
    assert section is not None
    metrics = MetricsSpec.model_validate(yaml.safe_load(section[1]))
    assert (metrics.host, metrics.port, metrics.ports) == ("0.0.0.0", 9400, 2)


def test_network_policy_does_not_select_pods_of_other_releases() -> None:
    (policy, *_) = objects_of_kind(render({}, release="other"), "NetworkPolicy")
    assert select_pods("default", policy["spec"]["podSelector"]) == []


@pytest.mark.parametrize("scenario", ["gpu", "locked-down"])
def test_pod_monitor_matches_pods_and_ports(scenario: str) -> None:
    (monitor,) = objects_of_kind(render_scenario(scenario), "PodMonitor")
    targets = select_pods(scenario, monitor["spec"]["selector"])
    assert find_pod(render_scenario(scenario), "head") in targets
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        assert any(endpoint["port"] in port_names(pod) for pod in targets)
        assert endpoint["honorLabels"], "the alerts and the dashboard need the job's `job` label"
    assert "namespaceSelector" not in monitor["spec"], "the default is the monitor's namespace"


@pytest.mark.parametrize("callers", [[], [{"podSelector": {"matchLabels": {"role": "notebook"}}}]])
def test_only_users_of_the_dashboard_reach_the_command_server(callers: list[Object]) -> None:
    """At the port that it listens on, which KubeRay's service takes from the container."""
    values = {"head": {"commandPort": 8300}, "networkPolicy": {"dashboardFrom": callers}}
    objects = render(values)
    (head,) = find_pod(objects, "head")["spec"]["containers"]
    assert {"name": "commands", "containerPort": 8300} in head["ports"]
    assert {"name": PORT_VARIABLE, "value": "8300"} in head["env"]
    policies = objects_of_kind(objects, "NetworkPolicy")
    rules = [rule for policy in policies for rule in policy["spec"]["ingress"]]
    opened = [rule for rule in rules if "commands" in str(rule.get("ports"))]
    expected = {"from": callers, "ports": [{"port": "commands", "protocol": "TCP"}]}
    assert opened == ([expected] if callers else [])
    for worker in (find_pod(objects, "worker"), find_pod(render({}), "worker")):
        assert PORT_VARIABLE not in str(worker)


def test_forwarded_ports_include_the_command_server() -> None:
    notes = render_text({"mode": "cluster"})["templates/NOTES.txt"]
    (forwarded,) = re.findall(r"port-forward svc/demo-rayzero-head-svc (.*)$", notes, re.MULTILINE)
    assert forwarded == "8265 8266"
    guide = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    assert f"svc/team-rayzero-head-svc {forwarded} " in guide


def test_only_calls_of_the_heads_api_pass_sidecars() -> None:
    """Ports of Ray, gloo and NCCL change from start to start: no list could name them."""
    inject, capture = "sidecar.istio.io/inject", "traffic.sidecar.istio.io/include"
    rendered = render_scenario("istio")
    injected = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod["metadata"]["labels"][inject]
        for pod in pods(rendered)
    }
    assert injected == {"head": "true", "worker": "false", "submitter": "true", "test": "false"}
    head = find_pod(rendered, "head")
    annotations = head["metadata"]["annotations"]
    ports = {port["name"]: port["containerPort"] for port in head["spec"]["containers"][0]["ports"]}
    api = [str(ports["dashboard"]), str(ports["commands"])]
    assert annotations[f"{capture}InboundPorts"].split(",") == api
    assert annotations[f"{capture}OutboundIPRanges"] == ""
    for role in ("head", "submitter"):
        native = find_pod(rendered, role)["metadata"]["annotations"][
            "sidecar.istio.io/nativeSidecar"
        ]
        assert native == "true", "a Job ends with its containers, of which this is none"


def test_one_label_keeps_every_pod_out_of_the_mesh() -> None:
    """As the guide has it, with `mode: job` and `mode: cluster`."""
    guide = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    labels = [
        yaml.safe_load(text) for text in re.findall(r"`(commonLabels: \{[^`]*istio[^`]*)`", guide)
    ]
    assert len(labels) == 2
    for values in labels:
        for mode in ("job", "cluster"):
            for pod in pods(render({"mode": mode} | values)):
                assert values["commonLabels"].items() <= pod["metadata"]["labels"].items()
