"""Counting of live bytes."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rayzero.engine.accounting import FlopCount
from rayzero.engine.planning.activations import LiveBytes, MicroStepTrace


def test_freed_storages_and_views_do_not_count():
    with LiveBytes([]) as live:
        a = torch.zeros(256)  # 1024 bytes
        b = a.view(16, 16)[1:]
        assert (live.live_bytes, live.peak_bytes) == (1024, 1024)
        c = a + 1
        del c
        assert (live.live_bytes, live.peak_bytes) == (1024, 2048)
        del a
        assert live.live_bytes == 1024, "a view keeps its storage"
        del b
        assert live.live_bytes == 0


def test_excluded_tensors_and_in_place_operations_do_not_count():
    excluded = torch.zeros(256)
    with LiveBytes([excluded]) as live:
        excluded.add_(1)
        excluded.view(2, 128).mul_(2)
    assert live.peak_bytes == 0


def test_saved_tensors_count_until_backward():
    layer = nn.Linear(256, 256, bias=False)
    x = torch.ones(4, 256)
    with LiveBytes([layer.weight, x]) as live:
        y = layer(x).relu()
        assert live.live_bytes == 4 * 256 * 4  # the output of relu, which is what it saves
        loss = y.sum()
        del y
        loss.backward()
        layer.weight.grad = None
        del loss
        assert live.live_bytes == 0
        assert live.peak_bytes >= 256 * 256 * 4, "includes the weight's gradient"


def test_flop_count_holds_nothing_that_checkpointing_recomputes():
    layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8))
    known = [*layers.parameters()]

    def peak(*, counted: bool) -> int:
        x = torch.ones(256, 64, requires_grad=True)
        with LiveBytes([*known, x]) as live, FlopCount() if counted else nullcontext():
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False)
            x.sum().backward()
        return live.peak_bytes

    assert peak(counted=True) == peak(counted=False)


def test_gradients_are_held_until_their_unit_can_be_reduced():
    trace = MicroStepTrace(
        flops=0, grads=(("b", 100), ("a", 60), ("b", 10), ("c", 30), ("d", 20)), last_bytes=5
    )
    assert trace.activation_bytes == 100
    assert trace.held_grad_bytes([{"a": 1, "b": 50}, {"c": 1, "d": 1}]) == 10, "a's peak, with b's"
    assert trace.held_grad_bytes([{"d": 1, "c": 1}, {"a": 1, "b": 50}]) == 10
    assert trace.held_grad_bytes([{"d": 90, "c": 90}, {"a": 1, "b": 50}]) == 61, "units in order"
    assert trace.held_grad_bytes([{"b": 50}, {"a": 1}, {"c": 1}, {"d": 1}]) == 0
    assert trace.held_grad_bytes([{"b": 50, "unused": 9}, {"a": 50, "c": 40, "d": 1}]) == 60
