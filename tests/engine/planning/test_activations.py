"""Counting of live bytes."""

from __future__ import annotations

import torch
from torch import nn

from rayzero.engine.planning.activations import LiveBytes


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
