"""The chart's values end in config maps and pods: what looks like a secret is refused there."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest
import yaml

from tests.deploy.chart import render, render_text

PLANTED = "pl4nted"

HELD: dict[str, tuple[dict[str, Any], str]] = {
    "argument": ({"job": {"spec": {"args": {"hf_token": PLANTED}}}}, "hf_token"),
    "nested argument": ({"job": {"spec": {"args": {"a": [{"apiKey": PLANTED}]}}}}, "apiKey"),
    "engine": ({"job": {"engine": {"comet": {"api_key": PLANTED}}}}, "api_key"),
    "runtime environment": (
        {"job": {"runtimeEnv": {"env_vars": {"HF_TOKEN": PLANTED}}}},
        "HF_TOKEN",
    ),
    "head's environment": (
        {"head": {"env": [{"name": "WANDB_API_KEY", "value": PLANTED}]}},
        "WANDB_API_KEY",
    ),
    "workers' environment": (
        {"workers": {"env": [{"name": "AWS_SECRET_ACCESS_KEY", "value": PLANTED}]}},
        "AWS_SECRET_ACCESS_KEY",
    ),
    "checkpoint": (
        {"job": {"spec": {"checkpoint": {"path": f"s3://key:{PLANTED}@bucket/runs"}}}},
        "credentials",
    ),
    "object store": ({"storage": {"objectStore": {"url": f"s3://k:{PLANTED}@b/r"}}}, "url"),
}


@pytest.mark.parametrize(("values", "named"), HELD.values(), ids=HELD)
def test_a_secret_in_the_values_is_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm_python.HelmError) as caught:
        render_text(values)
    assert named in str(caught.value)
    assert PLANTED not in str(caught.value) or "url" in named, "the schema's own message has it"


@pytest.mark.parametrize(
    "values",
    [
        {"job": {"spec": {"args": {"tokenizer": "gpt2", "pad_token": "<pad>", "tokens": "9"}}}},
        {"head": {"env": [{"name": "RAY_AUTH_TOKEN_PATH", "value": "/var/token"}]}},
        {"workers": {"env": [{"name": "TOKENIZERS_PARALLELISM", "value": "false"}]}},
    ],
)
def test_what_only_sounds_like_one_is_taken(values: dict[str, Any]) -> None:
    assert render(values)


def test_a_reference_is_how_it_is_given() -> None:
    reference = {"secretKeyRef": {"name": "wandb", "key": "api-key"}}
    values = {"workers": {"env": [{"name": "WANDB_API_KEY", "valueFrom": reference}]}}
    assert "secretKeyRef" in yaml.safe_dump(render(values))
