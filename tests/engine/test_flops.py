"""Flops of a micro-step, against what the shapes say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rayzero.engine.flops import FlopMeter, peak_flops


def one_micro_step(meter: FlopMeter) -> None:
    layer = nn.Linear(8, 16)
    x = torch.ones(4, 8, requires_grad=True)
    with meter.forward():
        y = layer(x)
    with meter.backward():
        y.sum().backward()


def test_a_linear_layer_is_three_matrix_products():
    meter = FlopMeter(wanted=True)
    one_micro_step(meter)
    assert meter.micro_step == 3 * 2 * 4 * 8 * 16
    one_micro_step(meter)
    assert meter.micro_step == 3 * 2 * 4 * 8 * 16, "counted once"


def test_an_evaluation_before_the_first_step_does_not_count():
    meter = FlopMeter(wanted=True)
    with torch.no_grad(), meter.forward():
        nn.Linear(8, 8)(torch.ones(1, 8))
    one_micro_step(meter)
    assert meter.micro_step == 3 * 2 * 4 * 8 * 16


def test_nothing_is_counted_that_nobody_wants():
    meter = FlopMeter(wanted=False)
    one_micro_step(meter)
    assert meter.micro_step == 0


def test_what_is_known_is_not_counted_again():
    meter = FlopMeter(wanted=True)
    meter.micro_step = 7
    one_micro_step(meter)
    assert meter.micro_step == 7


def test_an_unknown_device_has_no_peak(monkeypatch: pytest.MonkeyPatch):
    assert peak_flops(torch.device("cpu"), torch.float32) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    cuda = torch.device("cuda", 0)
    assert peak_flops(cuda, torch.bfloat16) == 989e12
    assert peak_flops(cuda, torch.float32) == 989e12 / 2
    assert peak_flops(cuda, torch.float64) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another one")
    assert peak_flops(cuda, torch.bfloat16) is None
