"""Host memory of a rank while a model is loaded at stage 3: half of the weights on two ranks, and
the largest tensor."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import rayzero
from tests.support.ranks import run_ranks

SMAPS = Path("/proc/self/smaps_rollup")
WIDTH, LAYERS = 2048, 4


def make_wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def proportional_set_size() -> int:
    line = next(it for it in SMAPS.read_text().splitlines() if it.startswith("Pss:"))
    return int(line.split()[1]) * 1024


def peak_while_loading(rank: int, world: int, folder: str) -> int:
    """Bytes over what the process had before."""
    # What programs do: glibc then serves large blocks from the heap, and keeps 64 MB of it.
    freed = torch.empty(33_000_000, dtype=torch.uint8)
    del freed
    stop, seen = threading.Event(), [0]
    begin = proportional_set_size()

    def sample() -> None:
        while not stop.wait(0.005):
            seen.append(proportional_set_size() - begin)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        with rayzero.zero_init():
            model = make_wide()
        rayzero.load_pretrained(model, folder)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 3},
        }
        engine, *_ = rayzero.initialize(model=model, config=config)
        seen.append(proportional_set_size() - begin)
    finally:
        stop.set()
        sampler.join()
    engine.close()
    return max(seen)


@pytest.mark.skipif(not SMAPS.exists(), reason="proportional set sizes are Linux's")
def test_a_rank_holds_its_half_and_one_tensor(tmp_path: Path) -> None:
    tensor_bytes = WIDTH * WIDTH * 4
    save_file(
        {f"{at}.weight": torch.zeros(WIDTH, WIDTH) for at in range(LAYERS)},
        tmp_path / "model.safetensors",
    )
    peaks = run_ranks(2, peak_while_loading, str(tmp_path))
    half = LAYERS * tensor_bytes // 2
    assert all(0.9 * half < peak <= (half + tensor_bytes) * 1.1 for peak in peaks), peaks
