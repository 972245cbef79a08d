"""Values that the chart refuses, values that only look so, and what others become. Each message
names the values, and says what is allowed or what to do. Values that a schema cannot refuse do not
go together, belong elsewhere, or are credentials, which would end up in config maps and pods; for
keys of the engine's config its parser is the oracle."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest

from rayzero.engine.config.checks import find_refused
from rayzero.orchestrator.job_file import load_job
from rayzero.orchestrator.spec import JobSpec
from tests.deploy.chart import (
    Object,
    cases,
    cluster_spec,
    find_pod,
    job_files,
    nested,
    objects_of_kind,
    pods,
    render,
    render_scenario,
    render_text,
)
from tests.house.source import ROOT

GPU, BOTH = "nvidia.com/gpu", ("requests", "limits")
FOUR = {key: {GPU: 4} for key in BOTH}
SECRET = "pl4nted"
COMPONENT = "app.kubernetes.io/component"


def groups(documents: dict[str, list[Any]]) -> Iterator[dict[str, list[Any]]]:
    """The cases in as few groups as have no value in common, since the schema reports all errors of
    a document at once, and takes a tenth of a second for any."""
    rest = documents
    while rest:
        group: dict[str, list[Any]] = {}
        for name, case in rest.items():
            if not any(overlap(case[0], other[0]) for other in group.values()):
                group[name] = case
        yield group
        rest = {name: case for name, case in rest.items() if name not in group}


def overlap(one: Any, other: Any) -> bool:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return True
    return any(overlap(one[key], other[key]) for key in one.keys() & other.keys())


def merge(one: Any, other: Any) -> Any:
    shared = {key: merge(one[key], other[key]) for key in one.keys() & other.keys()}
    return one | other | shared


def path_of(values: Any) -> str:
    """`/a/b` of a single value."""
    if not isinstance(values, dict):
        return ""
    ((key, value),) = values.items()
    return f"/{key}{path_of(value)}"


@pytest.mark.parametrize("group", groups(cases("invalid")), ids=lambda group: next(iter(group)))
def test_schema_rejects_invalid_values(group: dict[str, list[Any]]) -> None:
    values: dict[str, Any] = {}
    for case in group.values():
        values = merge(values, case[0])
    with pytest.raises(helm_python.HelmValuesError) as caught:
        render_text(values)
    text = str(caught.value)
    for name, (one, *path) in group.items():
        (expected,) = path or [path_of(one)]
        if re.fullmatch(r"[\w/.-]+", expected):
            expected += "'"  # not a path that begins so
        assert expected in text, name
        said = "value must be|, want |does not match pattern|missing propert"
        assert re.search(said, text[text.index(expected) :]), name
    assert not re.search("anyOf|'not' failed|false schema|'(enum|const)' failed", text), text


REFUSED = cases("conflicts") | cases("secrets")


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_chart_rejects_conflicting_values(case: list[Any]) -> None:
    values, words = case
    with pytest.raises(helm_python.HelmError) as caught:
        render_text(values)
    assert [word for word in words if word not in str(caught.value)] == []
    # The schema validator quotes a URL that does not match.
    assert SECRET not in str(caught.value) or words == ["url"]


@pytest.mark.parametrize("values", cases("accepted").values(), ids=cases("accepted"))
def test_similar_values_are_accepted(values: dict[str, Any]) -> None:
    assert render(values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"job.spec.workers": {"min": 4, "cpus": 3}, "workers.resources": FOUR},
            ("WARNING", "3 of the 4 GPUs of each pod of workers", "job.spec.workers.cpus"),
        ),
        (
            {"job.spec.workers": {"min": 2, "max": 2}, "workers.min": 4},
            ("WARNING", "room for 4 workers", "at most 2", "Lower workers.min"),
        ),
        (
            {"job.spec.workers": {"min": 1, "max": 1, "gpus": 1}, "workers.min": 4}
            | {
                "job.spec.roles.a": {
                    "entrypoint": "m:f",
                    "workers": {"min": 1, "max": 2, "gpus": 1},
                }
            },
            ("WARNING", "1 of the 4 GPUs of workers.min pods", "that of a role"),
        ),
        (
            {"job.spec.workers": {"min": 1, "max": 1, "gpus": 1}, "workers.min": 4}
            | {
                "job.spec.roles.a": {
                    "entrypoint": "m:f",
                    "workers": {"min": 1, "max": 3, "gpus": 1},
                }
            },
            (),
        ),
        ({}, ()),
        ({"auth.enabled": False, "networkPolicy.enabled": False}, ("WARNING", "WARNING")),
    ],
)
def test_notes_warn_of_idle_gpus_and_disabled_security(
    values: dict[str, Any], words: tuple[str, ...]
) -> None:
    notes = render_text(nested(values))["templates/NOTES.txt"]
    assert [word for word in words if word not in notes] == []
    assert notes.count("WARNING") == words.count("WARNING")
    assert ("will be idle" in notes) is bool({*words} - {"WARNING"})


ENGINES: list[dict[str, Any]] = [
    {"flops_profiler": {"enabled": True}},
    {"flops_profiler": {"enabled": False, "profile_step": 1}, "amp": {"enabled": "false"}},
    {"nebula": {"persistent_storage_path": "/a"}},
    {"nebula": {"enabled": False}, "sparse_gradients": False, "sequence_parallel_size": 1},
    {"elasticity": {"enabled": True, "max_train_batch_size": 64}},
    {"sparse_gradients": True},
    {"zero_optimization": {"mics_shard_size": 8}},
    {"zero_optimization": {"mics_shard_size": -1, "zenflow": None}},
    {"zero_optimization": {"offload_optimizer": {"device": "none", "super_offload": True}}},
    {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
    {"fp16": {"enabled": False, "fp16_master_weights_and_grads": True}},
    {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
    {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "max_grad_norm": 1.0}}},
    {"data_types": {"keep_in_fp32_modules": "auto"}, "autotuning": {"mp_size": 2}},
]


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_refused_keys(engine: dict[str, Any]) -> None:
    values = {"job": {"engine": engine}}
    refused = [line.partition(":")[0] for line in find_refused(engine)]
    if not refused:
        assert render(values)
        return
    with pytest.raises(helm_python.HelmError) as caught:
        render_text(values)
    assert f"job.engine.{refused[0]}: refused: " in str(caught.value)
    assert re.search(r"\(seen: .+\)", str(caught.value))


@pytest.mark.parametrize("fp16", [True, {"enabled": True}])
def test_two_precisions(fp16: Any) -> None:
    engine = {"fp16": fp16, "bf16": {"enabled": True}}
    with pytest.raises(
        helm_python.HelmError, match=r"job\.engine\.fp16\.enabled, .* set one to false"
    ):
        render_text({"job": {"engine": engine}})
    assert render({"job": {"engine": engine | {"bf16": {"enabled": False}}}})


ACCOUNTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "neither named": ({}, "demo-rayzero", "demo-rayzero-workers"),
    "one made": ({"name": "mysa"}, "mysa", "mysa"),
    "one there already": ({"create": False, "name": "mysa"}, "mysa", "mysa"),
    "both there already": ({"create": False, "name": "a", "workerName": "b"}, "a", "b"),
    "workers' named": ({"workerName": "data"}, "demo-rayzero", "data"),
    "the namespace's": ({"create": False}, "default", "default"),
}


@pytest.mark.parametrize(("values", "head", "others"), ACCOUNTS.values(), ids=ACCOUNTS)
def test_service_accounts(values: dict[str, Any], head: str, others: str) -> None:
    """A bucket that trusts one account is reached by workers and `helm test`, too; only the
    autoscaler's has a token and a role."""
    made = values.get("create", True)
    annotations = {"iam/role": "training"} if made else {}
    objects = render({"serviceAccount": values | {"annotations": annotations}})
    specs = {pod["metadata"]["labels"][COMPONENT]: pod["spec"] for pod in pods(objects)}
    accounts = {component: spec["serviceAccountName"] for component, spec in specs.items()}
    assert accounts == {"head": head, "worker": others, "submitter": others, "test": others}
    tokens = [name for name, spec in specs.items() if spec["automountServiceAccountToken"]]
    assert tokens == ["head"]
    (binding,) = objects_of_kind(objects, "RoleBinding")
    assert [subject["name"] for subject in binding["subjects"]] == [head]
    found = [item["metadata"] for item in objects_of_kind(objects, "ServiceAccount")]
    assert {item["name"] for item in found} == ({head, others} if made else set())
    assert all(item["annotations"] == annotations for item in found)


def test_numbers_and_script_of_the_job_file(tmp_path: Path) -> None:
    """Numbers keep type and value; a script takes the place of the example."""

    def load(spec: dict[str, Any]) -> JobSpec:
        job_files(render({"job": {"spec": spec}}), tmp_path)
        return load_job(tmp_path / "job.yaml")

    args = {"small": 1e-7, "large": 123456789012, "text": "1e3", "flag": True}
    spec = load({"args": args | {"none": None}, "steps": 20000000})
    assert (spec.steps, {key: spec.args[key] for key in args}) == (20000000, args)
    spec = load({"name": "x", "launch": {"script": "/app/train.py", "args": ["--epochs", 3]}})
    assert spec.launch is not None
    assert (spec.launch.script, spec.launch.args) == ("/app/train.py", ["--epochs", "3"])
    assert (spec.args, spec.steps, spec.engine) == ({}, None, None)


def test_worker_groups_inherit_worker_values() -> None:
    steady, spot = cluster_spec(render_scenario("spot"))["workerGroupSpecs"]
    assert (steady["minReplicas"], steady["maxReplicas"]) == (2, 2)
    assert (spot["minReplicas"], spot["maxReplicas"], spot["idleTimeoutSeconds"]) == (0, 14, 60)
    of_steady, of_spot = steady["template"]["spec"], spot["template"]["spec"]
    assert "nodeSelector" not in of_steady
    assert len(of_spot["tolerations"]) == 2
    assert of_steady["containers"][0]["resources"] == of_spot["containers"][0]["resources"]
    resources = {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}}
    group: Object = {"name": "cpu", "shmSize": "500Mi", "resources": resources}
    objects = render({"workerGroups": [group], "job": {"spec": {"workers": {"gpus": 0}}}})
    (cpu_group,) = cluster_spec(objects)["workerGroupSpecs"]
    assert cpu_group["template"]["spec"]["containers"][0]["resources"] == resources


def test_options_of_the_ray_job() -> None:
    """KubeRay starts new clusters for an error of the code and a killed head alike, by
    `backoffLimit`. A head alone it replaces, and the submitter's pod, which fails while no head
    answers, submits again to the new one."""
    params = {"num-cpus": "1", "object-store-memory": "1000000000"}
    for values, name, limit in [
        ({"job.suffix": "2", "job.backoffLimit": 3}, "demo-rayzero-2", 3),
        ({"job.suffix": "2", "fullnameOverride": "a" * 40}, "a" * 38 + "-2", 0),
        ({"head.rayStartParams": params}, "demo-rayzero", 0),
    ]:
        (job,) = objects_of_kind(render(nested(values)), "RayJob")
        assert (job["metadata"]["name"], job["spec"]["backoffLimit"]) == (name, limit)
    started = job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]
    assert started == {"dashboard-host": "0.0.0.0", **params}
    delays_s = [10 * 2**index for index in range(job["spec"]["submitterConfig"]["backoffLimit"])]
    assert sum(delays_s) >= 600, "too short for a new node"
    (job,) = objects_of_kind(render_scenario("kueue"), "RayJob")  # as Kueue requires
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    assert cluster_spec([job])["enableInTreeAutoscaling"] is False


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
