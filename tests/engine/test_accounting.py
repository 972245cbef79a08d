"""Flops, tokens and MFU of a step match the formulas of its shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import rayzero
from examples.gpt.model import GPT, GPTConfig
from rayzero.engine import compiling
from rayzero.engine.accounting import StepWork, flops_per_token, peak_flops
from tests.support.ranks import run_ranks


@pytest.fixture(autouse=True)
def nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, by an earlier test."""
    monkeypatch.setattr(compiling, "compiled_graphs", lambda: 0)


FLOPS = 3 * 2 * 4 * 8 * 16  # of a linear layer's three matrix products


def run_micro_step(work: StepWork, weight: float = 1.0) -> None:
    layer = nn.Linear(8, 16)
    x = torch.ones(4, 8, requires_grad=True)
    with work.track_forward(layer, x):
        y = layer(x)
    with work.track_backward(weight):
        y.sum().backward()


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("second_loss", [False, True])
def test_flops_are_counted_once_in_the_second_micro_step(evaluates: bool, second_loss: bool):
    """Without those of an evaluation before it, or of another backward of the first one."""
    work = StepWork(2, peak=FLOPS * 10.0, flops_per_token=1)
    for turn in range(3):
        if evaluates:
            with torch.no_grad(), work.track_forward(nn.Linear(8, 8), ()):
                nn.Linear(8, 8)(torch.ones(1, 8))
        run_micro_step(work, 0.5)
        if second_loss and not turn:
            with work.track_backward(0.0):
                pass
            work.count_backward(0.0)
        # The first shows whether torch.compile is used.
        assert work.micro_step_flops == (FLOPS if turn else 0)
    assert work.end_step(0.5) == {"flops_per_s": FLOPS * 4.0, "mfu": pytest.approx(0.4)}
    without = StepWork(1, peak=None)
    for _ in range(3):
        run_micro_step(without)
    assert without.micro_step_flops == 0


def test_flops_of_a_compiled_model_are_those_of_its_tokens():
    layer = nn.Linear(8, 16)
    layer.compile(backend="eager")  # not called: nothing is compiled
    for ndim, flops in ((2, 7 * 12), (1, 0)):  # tokens, or labels
        work = StepWork(1, peak=1.0, flops_per_token=7)
        for _ in range(2):
            with work.track_forward(layer, torch.ones((4, 3)[:ndim], dtype=torch.long)):
                pass
            with work.track_backward(1.0):
                pass
        assert work.micro_step_flops == flops
        assert work.end_step(1.0).get("mfu", 0) == flops


def test_peak_flops_by_device_name(monkeypatch: pytest.MonkeyPatch):
    assert peak_flops(torch.device("cpu"), torch.float32) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    cuda = torch.device("cuda", 0)
    assert peak_flops(cuda, torch.bfloat16) == 989e12
    assert peak_flops(cuda, torch.float32) == 989e12 / 2
    assert peak_flops(cuda, torch.float64) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "unknown")
    assert peak_flops(cuda, torch.bfloat16) is None


def test_tokens_are_those_of_the_global_batch():
    work = StepWork(micro_steps=2, peak=None)
    for samples in (3, 1):
        with work.track_forward(nn.Identity(), ([torch.ones(samples, 5, dtype=torch.long)], {})):
            pass
        with work.track_backward(weight=samples / 8):  # of 8 samples on all ranks
            pass
    assert work.end_step(2.0) == {"step_tokens": 8 * 5}
    assert work.end_step(2.0) == {}


def test_engine_metrics():
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
    with FlopCounterMode(display=False) as plain:
        GPT(shape)(tokens, tokens).backward()
    flops = metrics.flops_per_s * metrics.step_s
    assert flops == pytest.approx(2 * plain.get_total_flops())
    # Forward and backward of every matrix; attention is counted only for some kernels.
    matrices = sum(param.numel() for param in engine.module.parameters() if param.ndim == 2)
    assert 0.999 <= flops / (6 * matrices * 2 * 16 * 2) < 1.5
    assert metrics.mfu == pytest.approx(metrics.flops_per_s / 1e9)
    engine.set_train_batch_size(6)
    for _ in range(3):
        engine.backward(engine(tokens, tokens))
        engine.step()
    assert engine.metrics.flops_per_s * engine.metrics.step_s == pytest.approx(1.5 * flops)
    engine.set_train_micro_batch_size(1)
    for _ in range(3):
        engine.backward(engine(tokens[:1], tokens[:1]))
        engine.step()
    assert engine.metrics.flops_per_s * engine.metrics.step_s == pytest.approx(0.75 * flops)


def estimate_flops_per_token(rank: int, world: int, model: GPT, document: dict, expected: int):
    engine, *_ = rayzero.initialize(model=model, config=document)
    assert flops_per_token(engine._runtime) == expected


@pytest.mark.parametrize("stage", [0, 3])
def test_flops_per_token_of_the_model(stage: int):
    shape = GPTConfig(vocab=96, context=16, layers=2, width=32, heads=2)
    model, frozen = GPT(shape), GPT(shape).blocks[0]
    model.blocks[0].requires_grad_(False)
    document = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "rayzero": {"peak_flops": 1e9},
        "zero_optimization": {"stage": stage},
    }
    total = sum(param.numel() for param in model.parameters())
    fixed = sum(param.numel() for param in frozen.parameters())
    run_ranks(2, estimate_flops_per_token, model, document, 6 * total - 2 * fixed)
