"""The chart rejects credentials in values, because values end up in config maps and pods."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest
import yaml

from tests.deploy.chart import render, render_text

SECRET = "pl4nted"

VALUES_WITH_SECRET: dict[str, tuple[dict[str, Any], str]] = {
    "argument": ({"job": {"spec": {"args": {"hf_token": SECRET}}}}, "hf_token"),
    "nested argument": ({"job": {"spec": {"args": {"a": [{"apiKey": SECRET}]}}}}, "apiKey"),
    "engine": ({"job": {"engine": {"comet": {"api_key": SECRET}}}}, "api_key"),
    "runtime environment": (
        {"job": {"runtimeEnv": {"env_vars": {"HF_TOKEN": SECRET}}}},
        "HF_TOKEN",
    ),
    "head's environment": (
        {"head": {"env": [{"name": "WANDB_API_KEY", "value": SECRET}]}},
        "WANDB_API_KEY",
    ),
    "workers' environment": (
        {"workers": {"env": [{"name": "AWS_SECRET_ACCESS_KEY", "value": SECRET}]}},
        "AWS_SECRET_ACCESS_KEY",
    ),
    "checkpoint": (
        {"job": {"spec": {"checkpoint": {"path": f"s3://key:{SECRET}@bucket/runs"}}}},
        "credentials",
    ),
    "object store": ({"storage": {"objectStore": {"url": f"s3://k:{SECRET}@b/r"}}}, "url"),
}


@pytest.mark.parametrize(("values", "key"), VALUES_WITH_SECRET.values(), ids=VALUES_WITH_SECRET)
def test_secret_in_values_is_rejected(values: dict[str, Any], key: str) -> None:
    with pytest.raises(helm_python.HelmError) as caught:
        render_text(values)
    assert key in str(caught.value)
    # The schema validator quotes a URL that does not match.
    assert SECRET not in str(caught.value) or "url" in key


@pytest.mark.parametrize(
    "values",
    [
        {"job": {"spec": {"args": {"tokenizer": "gpt2", "pad_token": "<pad>", "tokens": "9"}}}},
        {"head": {"env": [{"name": "RAY_AUTH_TOKEN_PATH", "value": "/var/token"}]}},
        {"workers": {"env": [{"name": "TOKENIZERS_PARALLELISM", "value": "false"}]}},
    ],
)
def test_harmless_names_are_accepted(values: dict[str, Any]) -> None:
    assert render(values)


def test_secret_reference_is_accepted() -> None:
    reference = {"secretKeyRef": {"name": "wandb", "key": "api-key"}}
    values = {"workers": {"env": [{"name": "WANDB_API_KEY", "valueFrom": reference}]}}
    assert "secretKeyRef" in yaml.safe_dump(render(values))
