"""Values that the chart refuses, and values that only look so. Each message names the values, and
says what is allowed or what to do. Values that a schema cannot refuse do not go together, belong
elsewhere, or are credentials, which would end up in config maps and pods; for keys of the engine's
config its parser is the oracle."""

from __future__ import annotations

import re
from typing import Any

import helm_python
import pytest
import yaml

from rayzero.engine.config.checks import find_refused
from tests.deploy.chart import cases, nested, render, render_text

GPU, BOTH = "nvidia.com/gpu", ("requests", "limits")
FOUR = {key: {GPU: 4} for key in BOTH}
SECRET = "pl4nted"


@pytest.mark.parametrize("case", cases("invalid").values(), ids=cases("invalid"))
def test_schema_rejects_invalid_values(case: list[Any]) -> None:
    values, *path = case
    with pytest.raises(helm_python.HelmValuesError) as caught:
        render_text(values)
    text = str(caught.value)
    assert (path[0] if path else path_of(values)) in text
    assert re.search("value must be|, want |does not match pattern|missing propert", text), text
    assert not re.search("anyOf|'not' failed|false schema|'(enum|const)' failed", text), text


def path_of(values: Any) -> str:
    """`/a/b` of a single value."""
    if not isinstance(values, dict):
        return ""
    ((key, value),) = values.items()
    return f"/{key}{path_of(value)}"


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
    "workers",
    [
        {"resources": {key: {GPU: None} for key in BOTH}, "rayStartParams": {"num-gpus": "2"}},
        {"resources": {"requests": {GPU: 2}, "limits": {"cpu": None, GPU: 2}}},
    ],
)
def test_room_for_workers_is_what_kuberay_tells_ray(workers: dict[str, Any]) -> None:
    """A resource claim's GPUs are in rayStartParams; without a limit CPUs are the request's."""
    assert render({"job": {"spec": {"workers": {"min": 8}}}, "workers": workers})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"job.spec.workers": {"min": 4, "cpus": 3}, "workers.resources": FOUR},
            ("3 of the 4 GPUs of each pod of workers", "job.spec.workers.cpus"),
        ),
        (
            {"job.spec.workers": {"min": 2, "max": 2}, "workers.min": 4},
            ("room for 4 workers", "at most 2", "Lower workers.min"),
        ),
        ({}, ()),
    ],
)
def test_notes_warn_of_idle_gpus(values: dict[str, Any], words: tuple[str, ...]) -> None:
    notes = render_text(nested(values))["templates/NOTES.txt"]
    assert [word for word in words if word not in notes] == []
    assert ("will be idle" in notes) is bool(words)


def test_secret_reference_is_accepted() -> None:
    reference = {"secretKeyRef": {"name": "wandb", "key": "api-key"}}
    values = {"workers": {"env": [{"name": "WANDB_API_KEY", "valueFrom": reference}]}}
    assert "secretKeyRef" in yaml.safe_dump(render(values))


ENGINES: list[dict[str, Any]] = [
    {"flops_profiler": {"enabled": True}},
    {"flops_profiler": {"enabled": False, "profile_step": 1}, "amp": {"enabled": "false"}},
    {"nebula": {"persistent_storage_path": "/a"}},
    {"nebula": {"enabled": False}, "sparse_gradients": False, "sequence_parallel_size": 1},
    {"elasticity": {"enabled": True, "max_train_batch_size": 64}},
    {"sparse_gradients": True},
    {"sequence_parallel_size": 2},
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
