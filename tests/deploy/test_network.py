"""Who may reach which ports: metrics of several jobs, the command server, meshes."""

from __future__ import annotations

import re

import pytest
import yaml

from rayzero.orchestrator.job.command_server import PORT_VARIABLE
from rayzero.orchestrator.spec_sections import MetricsSpec
from tests.deploy.chart import (
    Object,
    container_of,
    find_pod,
    objects_of_kind,
    pods,
    ports_of,
    render,
    render_scenario,
    render_text,
    select_pods,
)
from tests.house.source import ROOT


def test_cluster_has_metrics_ports_for_several_jobs() -> None:
    """The pod monitor scrapes all ports, and the notes show the job file's `metrics` section."""
    for scenario, count in {"default": 1, "cluster": 8}.items():
        ports = ports_of([find_pod(render_scenario(scenario), "head")])
        named = {name: port for name, port in ports.items() if name.startswith("rayzero-")}
        assert list(named.values()) == list(range(9400, 9400 + count))
        assert all(len(name) <= 15 for name in named), "limit of Kubernetes"
    values = {"mode": "cluster", "metrics": {"podMonitor": {"enabled": True}, "ports": 2}}
    (monitor,) = objects_of_kind(render(values), "PodMonitor")
    scraped = [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]]
    assert scraped == ["rayzero-metrics", "rayzero-1", "metrics"]
    notes = render_text(values)["templates/NOTES.txt"]
    section = re.search(r"^  metrics: (.*)$", notes, re.MULTILINE)
    assert section is not None
    metrics = MetricsSpec.model_validate(yaml.safe_load(section[1]))
    assert (metrics.host, metrics.port, metrics.ports) == ("0.0.0.0", 9400, 2)
    (forwarded,) = re.findall(r"port-forward svc/demo-rayzero-head-svc (.*)$", notes, re.MULTILINE)
    assert forwarded == "8265 8266"
    guide = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    assert f"svc/team-rayzero-head-svc {forwarded} " in guide


def test_network_policy_does_not_select_pods_of_other_releases() -> None:
    (policy, *_) = objects_of_kind(render({}, release="other"), "NetworkPolicy")
    assert select_pods("default", policy["spec"]["podSelector"]) == []


@pytest.mark.parametrize("callers", [[], [{"podSelector": {"matchLabels": {"role": "notebook"}}}]])
def test_only_users_of_the_dashboard_reach_the_command_server(callers: list[Object]) -> None:
    """At the port that it listens on, which KubeRay's service takes from the container."""
    values = {"head": {"commandPort": 8300}, "networkPolicy": {"dashboardFrom": callers}}
    objects = render(values)
    head = container_of(objects, "head")
    assert {"name": "commands", "containerPort": 8300} in head["ports"]
    assert {"name": PORT_VARIABLE, "value": "8300"} in head["env"]
    policies = objects_of_kind(objects, "NetworkPolicy")
    rules = [rule for policy in policies for rule in policy["spec"]["ingress"]]
    opened = [rule for rule in rules if "commands" in str(rule.get("ports"))]
    expected = {"from": callers, "ports": [{"port": "commands", "protocol": "TCP"}]}
    assert opened == ([expected] if callers else [])
    assert PORT_VARIABLE not in str(find_pod(objects, "worker"))


def test_only_calls_of_the_heads_api_pass_sidecars() -> None:
    """Ports of Ray, gloo and NCCL change from start to start: no list could name them."""
    inject, capture = "sidecar.istio.io/inject", "traffic.sidecar.istio.io/include"
    rendered = render_scenario("istio")
    injected = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod["metadata"]["labels"][inject]
        for pod in pods(rendered)
    }
    assert injected == {"head": "true", "worker": "false", "submitter": "true", "test": "false"}
    annotations = find_pod(rendered, "head")["metadata"]["annotations"]
    ports = ports_of([find_pod(rendered, "head")])
    api = [str(ports["dashboard"]), str(ports["commands"])]
    assert annotations[f"{capture}InboundPorts"].split(",") == api
    assert annotations[f"{capture}OutboundIPRanges"] == ""
    for role in ("head", "submitter"):
        native = find_pod(rendered, role)["metadata"]["annotations"]
        assert native["sidecar.istio.io/nativeSidecar"] == "true", "a Job ends with its containers"


def test_one_label_keeps_every_pod_out_of_the_mesh() -> None:
    """As the guide has it, with `mode: job` and `mode: cluster`."""
    guide = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    texts = re.findall(r"`(commonLabels: \{[^`]*istio[^`]*)`", guide)
    assert len(texts) == 2
    for values, mode in zip(map(yaml.safe_load, texts), ("job", "cluster"), strict=True):
        for pod in pods(render({"mode": mode} | values)):
            assert values["commonLabels"].items() <= pod["metadata"]["labels"].items()
