"""Flops of a micro-step, against what the shapes say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rayzero
from examples.gpt.model import GPT, GPTConfig
from rayzero.engine.accounting import StepWork, peak_flops


def one_micro_step(work: StepWork) -> None:
    layer = nn.Linear(8, 16)
    x = torch.ones(4, 8, requires_grad=True)
    with work.track_forward(x):
        y = layer(x)
    with work.track_backward(1.0):
        y.sum().backward()


def test_a_linear_layer_is_three_matrix_products():
    work = StepWork(1, peak=1.0)
    one_micro_step(work)
    assert work.micro_step_flops == 3 * 2 * 4 * 8 * 16
    one_micro_step(work)
    assert work.micro_step_flops == 3 * 2 * 4 * 8 * 16, "counted once"


def test_an_evaluation_before_the_first_step_does_not_count():
    work = StepWork(1, peak=1.0)
    with torch.no_grad(), work.track_forward(()):
        nn.Linear(8, 8)(torch.ones(1, 8))
    one_micro_step(work)
    assert work.micro_step_flops == 3 * 2 * 4 * 8 * 16


def test_flops_are_not_counted_without_a_peak():
    work = StepWork(1, peak=None)
    one_micro_step(work)
    assert work.micro_step_flops == 0


def test_an_unknown_device_has_no_peak(monkeypatch: pytest.MonkeyPatch):
    assert peak_flops(torch.device("cpu"), torch.float32) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    cuda = torch.device("cuda", 0)
    assert peak_flops(cuda, torch.bfloat16) == 989e12
    assert peak_flops(cuda, torch.float32) == 989e12 / 2
    assert peak_flops(cuda, torch.float64) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another one")
    assert peak_flops(cuda, torch.bfloat16) is None


def test_tokens_are_the_global_batchs():
    work = StepWork(micro_steps=2, peak=None)
    for samples in (3, 1):
        with work.track_forward(([torch.ones(samples, 5, dtype=torch.long)], {})):
            pass
        with work.track_backward(weight=samples / 8):  # of 8 samples on all ranks
            pass
    assert work.end_step(2.0) == {"step_tokens": 8 * 5}
    assert work.end_step(2.0) == {}


def test_utilisation_is_of_the_peak():
    work = StepWork(micro_steps=2, peak=3072 * 10.0)
    layer, x = nn.Linear(8, 16), torch.ones(4, 8, requires_grad=True)
    for _ in range(2):
        with work.track_forward(x):
            y = layer(x)
        with work.track_backward(0.5):
            y.sum().backward()
    assert work.end_step(0.5) == {"flops_per_s": 3072 * 4.0, "mfu": pytest.approx(0.4)}


def test_the_metrics_of_an_engine():
    shape = GPTConfig(vocab=96, context=16, layers=1, width=32, heads=2)
    document = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "rayzero": {"peak_flops": 1e9},
    }
    engine, *_ = rayzero.initialize(model=GPT(shape), config=document)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    for _ in range(2):
        engine.backward(engine(tokens, tokens))
        engine.step()
    metrics = engine.metrics
    assert metrics.tokens_per_s == pytest.approx(2 * 2 * 16 / metrics.step_s)
    assert metrics.mfu is not None
    assert metrics.flops_per_s is not None
    # Forward and backward of every matrix, and attention where its kernel is counted.
    matrices = sum(param.numel() for param in engine.module.parameters() if param.ndim == 2)
    least = 6 * matrices * 2 * 16 * 2
    assert 0.999 <= metrics.flops_per_s * metrics.step_s / least < 1.5
    assert metrics.mfu == pytest.approx(metrics.flops_per_s / 1e9)
