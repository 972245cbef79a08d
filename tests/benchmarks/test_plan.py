"""What `rayzero plan` estimates equals what two ranks and torch use."""

from __future__ import annotations

import pytest

from benchmarks.plan import make_config, measured_peak, measured_total, plan, planned_peak
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "checkpointing", "stage"),
    [("GPT-2", "non-reentrant", 2), ("Llama", "none", 1), ("ViT", "non-reentrant", 3)],
)
def test_total_equals_that_of_two_ranks(family: str, checkpointing: str, stage: int):
    document = make_config(stage, "fp32")
    measured = max(run_ranks(2, measured_total, family, checkpointing, document))
    planned = plan(family, checkpointing, document, 2).device_total_bytes
    assert planned == pytest.approx(measured, rel=0.05)


def test_activations_of_a_compiled_model_equal_those_of_torch():
    planned = planned_peak("GPT-2", "none", "fp32", compiled=True)
    measured = measured_peak("GPT-2", "none", "fp32", compiled=True)
    assert planned == pytest.approx(measured, rel=0.05)
