"""NVMe offload: bounded memory, error messages, no leftover files and threads."""

from __future__ import annotations

import errno
import gc
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rayzero
from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.offload import nvme_store
from rayzero.engine.offload.nvme_store import MappedFile
from tests.engine.offload.training import config, make_engine, offload_configs, run_steps
from tests.support.processes import PROCESSES


def nvme(folder: Path) -> dict[str, Any]:
    return offload_configs(folder)["nvme"]


class TestMappedFile:
    def test_written_values_are_mapped(self, tmp_path: Path) -> None:
        file = MappedFile(tmp_path / "created")
        first, second = file.new_tensor(5, torch.bfloat16), file.new_tensor(3000, torch.float32)
        assert not first.any()
        assert not second.any()
        values = torch.randn(3000)
        file.write(second[7:], values[7:])
        assert torch.equal(second[7:], values[7:])
        assert not second[:7].any()
        assert not first.any()
        second[:7] = 1.0
        back = torch.empty(10)
        file.read(second, back)
        assert torch.equal(back, torch.cat((torch.ones(7), values[7:10])))
        assert second[7:] in file
        assert values not in file
        assert not list((tmp_path / "created").iterdir())

    def test_tensors_outlive_the_file(self, tmp_path: Path) -> None:
        file = MappedFile(tmp_path)
        tensor = file.new_tensor(4, torch.float32)
        file.close()
        tensor += 1
        assert tensor.sum() == 4

    def test_folder_that_cannot_be_created(self) -> None:
        with pytest.raises(ConfigError, match=r"(?s)offload to .*nvme_path"):
            MappedFile(Path("/proc/nowhere"))

    def test_truncated_file(self, tmp_path: Path) -> None:
        file = MappedFile(tmp_path)
        tensor = file.new_tensor(4, torch.float32)
        os.ftruncate(file._file.fileno(), 0)
        with pytest.raises(EngineError, match="the file ends at 0"):
            file.read(tensor, torch.empty_like(tensor))


class FailingOs:
    """Module `os`, with one function that fails after a number of calls."""

    def __init__(self, name: str, error: int, after: int) -> None:
        self._name, self._error, self._left = name, error, after

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name != self._name:
            return real

        def call(*args: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise OSError(self._error, os.strerror(self._error))
            return real(*args)

        return call


@pytest.mark.parametrize(
    ("call", "error", "after", "message"),
    [
        ("preadv", errno.EIO, 5, "a read failed: Input/output error"),
        ("pwritev", errno.ENOSPC, 0, "a write failed: No space left on device"),
        ("pwritev", errno.EIO, 7, "a write failed: Input/output error"),
        ("posix_fallocate", errno.ENOSPC, 3, "could not be allocated: No space left on device"),
    ],
)
def test_disk_errors_name_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int, after: int, message: str
) -> None:
    engine = make_engine(config(2, "bf16", **nvme(tmp_path)))
    if call == "preadv":
        run_steps(engine, [0])  # the first update reads nothing but main weights
    monkeypatch.setattr(nvme_store, "os", FailingOs(call, error, after))
    with pytest.raises(EngineError, match=message) as raised:
        run_steps(engine, [1])
    assert str(tmp_path) in str(raised.value)
    assert "nvme_path" in str(raised.value)
    assert not engine.state.consistent  # half-updated: never saved
    group = engine.optimizer.param_groups[0]
    assert len(group["params"]) > 1  # all parameters are restored
    monkeypatch.undo()
    engine.close()


def test_close_stops_the_threads(tmp_path: Path) -> None:
    def threads() -> list[threading.Thread]:
        return [
            thread for thread in threading.enumerate() if thread.name.startswith("rayzero-disk")
        ]

    before = threads()  # of engines that no garbage collection has found yet
    engine = make_engine(config(1, "bf16", **nvme(tmp_path)))
    run_steps(engine, [0, 1])
    started = [thread for thread in threads() if thread not in before]
    assert started
    engine.close()
    for thread in started:
        thread.join(60)
    assert not any(thread.is_alive() for thread in started)


WIDTH, LAYERS = 512, 24


def anonymous_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def measure_steps(folder: Path) -> tuple[int, dict[str, int]]:
    """Growth of memory in the optimizer's steps, and the engine's sizes."""
    torch.set_num_threads(1)
    zero = nvme(folder) | {"stage": 2, "sub_group_size": 65536}
    zero["offload_optimizer"]["buffer_count"] = 4
    engine, *_ = rayzero.initialize(
        model=nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "bf16": {"enabled": True},
            "zero_optimization": zero | {"reduce_bucket_size": WIDTH * WIDTH},
        },
    )
    engine.backward(engine(torch.randn(2, WIDTH)).square().mean())
    gc.collect()
    before = anonymous_bytes()  # including gradients
    peaks = []
    optimizer: Any = engine._step.optimizer
    restrict = optimizer._set_params

    def watched(shards: Any) -> None:
        peaks.append(anonymous_bytes())
        restrict(shards)

    optimizer._set_params = watched
    engine.step()
    for _ in range(3):
        engine.backward(engine(torch.randn(2, WIDTH)).square().mean())
        engine.step()
    return max(peaks) - before, engine.metrics.bytes


def test_memory_is_bounded_by_the_buffers(tmp_path: Path) -> None:
    """At most four chunks of 75 MB of state are in memory."""
    with ProcessPoolExecutor(1, PROCESSES) as pool:  # memory that other tests freed hides growth
        grown, sizes = pool.submit(measure_steps, tmp_path).result(300)
    state, main = sizes["disk_optimizer_state"], sizes["disk_main_weights"]
    staging = sizes["host_staging"]
    assert state > 48e6
    assert main > 24e6
    assert staging == 4 * 3 * 65536 * 4
    # The margin is for state created by the first update, and for threads.
    assert grown < staging + 8e6, (grown, staging)
    assert grown < (state + main) / 3
