"""Samples made in processes: their order, random numbers, faults, ends, and leaks."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rayzero
import rayzero.data
from rayzero.engine.config.sections import LoaderConfig
from rayzero.engine.data.loader import StepLoader
from rayzero.engine.data.loader_pool import LoaderPool
from rayzero.engine.data.loader_process import loader_server
from rayzero.engine.data.micro_batches import MicroBatches
from rayzero.engine.data.reading import BatchReader
from rayzero.engine.data.sample_source import DatasetSource
from rayzero.engine.data.sampling import SampleOrder, StepSplit, TrainingProgress, assign_step
from rayzero.engine.data.streams.iterable_source import IterableSource
from rayzero.engine.errors import DataError
from tests.engine.data.items import LENGTH, Items, hang
from tests.engine.data.streams.memory import MemorySource, make_source

END_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def one_server() -> Iterator[None]:
    """For all tests here: it takes seconds to start; and ends with the last who refers to it."""
    server = loader_server()
    process = psutil.Process(server.pid)
    yield
    del server
    gc.collect()
    assert not process.is_running()


def make_loader(
    make: Callable[[int], Any],
    workers: int = 2,
    world: tuple[int, int] = (1, 0),
    batch: int = 8,
    micro_batch: int = 4,
    cursor: int = 0,
    **options: Any,
) -> StepLoader:
    progress = TrainingProgress(sample_cursor=cursor, global_batch=batch)
    own = MicroBatches(progress, StepSplit(assign_step(batch, *world, micro_batch)))
    config = LoaderConfig(num_workers=workers, **options)
    return StepLoader(DatasetSource(Items(make), 5), own, list, config=config)


def read_steps(loader: StepLoader, steps: int) -> list[Any]:
    """The samples of this rank, without fillers."""
    samples = []
    for number, batch in enumerate(loader.steps(steps)):
        part = loader._micro_batches.split[number % loader.micro_steps]
        samples += batch[: part.count]
    loader.close()
    return samples


def indices(start: int, count: int) -> list[int]:
    return SampleOrder(LENGTH, 5).indices(start, count).tolist()


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 3), st.sampled_from([1, 2, 3]), st.integers(1, 5), st.integers(0, 3))
def test_order_is_that_of_the_thread(
    workers: int, world: int, micro_batch: int, finished: int
) -> None:
    """Random numbers, too, are of the position: not of the process, the rank or the batch."""

    def make(index: int) -> Any:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))

    def read(world: int, workers: int, micro_batch: int) -> list[list[Any]]:
        ranks = [
            make_loader(make, workers, (world, it), 8, micro_batch, 8 * finished)
            for it in range(world)
        ]
        return [read_steps(it, 6) for it in ranks]

    (alone,) = read(1, 1, 8)
    ranks = read(world, workers, micro_batch)
    assert [it[0] for it in alone] == indices(8 * finished, 48)
    steps = [
        [it[step * len(it) // 6 : (step + 1) * len(it) // 6] for it in ranks] for step in range(6)
    ]
    assert [sample for step in steps for rank in step for sample in rank] == alone
    assert len({it[1] for it in alone}) == len({it[3] for it in alone}) == 48, "also in two epochs"


def test_samples_keep_their_places_whichever_is_done_first(tmp_path: Path) -> None:
    first, last = indices(0, 8)[0], indices(0, 8)[7]

    def make(index: int) -> int:
        while index == first and not (tmp_path / "last").exists():
            time.sleep(0.01)
        if index == last:
            (tmp_path / "last").touch()
        return index

    assert read_steps(make_loader(make), 2) == indices(0, 16)


def test_tensors_arrays_and_own_classes_come_back() -> None:
    class Own:
        def __init__(self, value: object) -> None:
            self.value = value

    def make(index: int) -> Any:
        half = torch.full((2,), index, dtype=torch.bfloat16)
        return Own({"a": torch.arange(3)[1:], "b": half, "c": np.arange(2.0)})

    (sample, *_) = next(make_loader(make).steps(1))
    assert type(sample) is Own
    assert sample.value["a"].tolist() == [1, 2]
    assert sample.value["b"].tolist() == [indices(0, 1)[0]] * 2
    sample.value["a"] += 1
    assert sample.value["c"].tolist() == [0, 1]


FAULTS: dict[str, tuple[Callable[[int], Any], str, dict[str, Any]]] = {
    "raises": (lambda index: [][index], "IndexError: list index out of range", {}),
    "hangs": (hang, "it was not done within 1.5 s", {"sample_timeout_s": 1.5}),
    "ends": (lambda index: os._exit(3), "its process has ended with status 3", {}),
    "is killed": (
        lambda index: os.kill(os.getpid(), signal.SIGKILL),
        "its process has ended with status -9",
        {},
    ),
    "is a lock": (lambda index: threading.Lock(), "it cannot be pickled: TypeError", {}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_sample_is_named_or_left_out(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """Another process makes what the bad one had to do."""
    break_, reason, options = FAULTS[fault]
    bad = set(indices(3, 2))

    def make(index: int) -> Any:
        return break_(index) if index in bad else index

    named = rf"sample \d+ of the training data cannot be used: .*{reason}"
    loader = make_loader(make, max_bad_samples=1, **options)
    with pytest.raises(DataError, match=named):
        read_all(loader)
    loader.close()
    loader = make_loader(make, max_bad_samples=2, **options)
    assert read_all(loader) == [it for it in indices(0, 16) if it not in bad]
    loader.close()
    for sample in bad:
        assert f"sample {sample} of the training data cannot be used" in caplog.text
    commands = [it.info["cmdline"] or [""] for it in psutil.process_iter(["cmdline"])]
    assert not [it for it in commands if it[-1].endswith("time.sleep(1234)")]


def read_all(loader: StepLoader) -> list[Any]:
    return [sample for batch in loader.steps(2) for sample in batch]


def test_error_has_the_traceback_of_the_process() -> None:
    def make(index: int) -> Any:
        raise KeyError("lost")

    with pytest.raises(DataError, match="KeyError: 'lost'") as caught:
        read_steps(make_loader(make), 1)
    assert "in make" in str(caught.value.__cause__)
    assert "max_bad_samples" in caught.value.fix


def test_training_data_that_cannot_be_sent_or_loaded() -> None:
    lock = threading.Lock()
    with pytest.raises(DataError, match="cannot be sent to the loader's processes: TypeError"):
        make_loader(lambda index: lock)

    class Unloadable:
        def __reduce__(self) -> Any:
            return int, ("no number",)

    unloadable = Unloadable()
    with pytest.raises(DataError, match="cannot be loaded in a process of the loader: ValueError"):
        read_steps(make_loader(lambda index: unloadable), 1)

    class Slow:
        def __reduce__(self) -> Any:
            return time.sleep, (1000,)

    slow = Slow()
    with pytest.raises(DataError, match=r"did not start: it was not done within 0\.5 s") as caught:
        read_steps(make_loader(lambda index: slow, start_timeout_s=0.5), 1)
    assert "start_timeout_s" in caught.value.fix


@pytest.mark.parametrize("workers", [0, 2])
def test_a_row_is_named_by_source_block_and_row(workers: int) -> None:
    def transform(row: dict[str, Any]) -> int:
        return row["row"] if row["row"] != 6 else 1 // 0

    source = make_source(rayzero.data.stream(MemorySource([5, 3, 8]), 3, transform=transform), 4)
    own = MicroBatches(TrainingProgress(global_batch=4), StepSplit(assign_step(4, 1, 0, 4)))
    loader = StepLoader(source, own, list, config=LoaderConfig(num_workers=workers))
    named = r"row 1 of block 1 of 'memory' \(memory block 1\) cannot be used: ZeroDivisionError"
    with pytest.raises(DataError, match=named):
        read_steps(loader, 4)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_rows_of_an_iterable_are_named_counted_and_left_out(workers: int) -> None:
    def transform(row: tuple[int, int]) -> Any:
        if row == (0, 3) and workers:
            hang(0)
        return row if row not in ((1, 0), (1, 1), (0, 3)) else 1 // 0

    def read(limit: int) -> list[Any]:
        stream = rayzero.data.iterable(
            lambda reader, _: [(reader, row) for row in range(50)],
            2,
            transform=transform,
            replay=True,
        )
        progress = TrainingProgress(global_batch=4)
        own = MicroBatches(progress, StepSplit(assign_step(4, 1, 0, 2)))
        config = LoaderConfig(num_workers=workers, sample_timeout_s=1.5, max_bad_samples=limit)
        source = IterableSource(stream, 5, progress, lambda *_: None)
        reader = BatchReader(source, own, list, torch.device("cpu"), config)
        try:
            read = [*reader.read(own.split, 0, 0, 2, threading.Event())]
        finally:
            reader.close()
        assert source.take_counts()["iterable"]["samples"] == 4
        return [(it.weight, it.own_indices, it.skipped, batch) for it, batch in read]

    assert read(3) == [
        (0.5, [0, 2], [], [(0, 0), (0, 1)]),
        (0.0, [1, 3], [1, 3], [(0, 2)]),  # the next good row is its filler
        (0.25, [4, 6], [6], [(0, 2)]),
        (0.5, [5, 7], [], [(1, 2), (1, 3)]),
    ]
    reason = "not done within 1.5 s" if workers else "ZeroDivisionError"
    with pytest.raises(DataError, match=rf"row 3 of reader 0 cannot be used: .*{reason}"):
        read(2)


def test_rows_that_cannot_be_sent_to_processes() -> None:
    stream = rayzero.data.iterable(
        lambda *_: (threading.Lock() for _ in range(9)), 1, transform=str, replay=True
    )
    progress = TrainingProgress(global_batch=1)
    own = MicroBatches(progress, StepSplit(assign_step(1, 1, 0, 1)))
    source = IterableSource(stream, 5, progress, lambda *_: None)
    with pytest.raises(DataError, match="cannot be sent to the loader's processes: TypeError"):
        read_steps(StepLoader(source, own, list, config=LoaderConfig(num_workers=1)), 1)


def test_a_sample_that_hangs_in_the_thread_is_named() -> None:
    release, bad = threading.Event(), indices(5, 1)[0]

    def make(index: int) -> int:
        if index == bad:
            release.wait(END_S)
        return index

    loader = make_loader(make, workers=0, sample_timeout_s=0.2)
    batches = loader.steps(1)
    next(batches)
    releaser = threading.Timer(1.0, release.set)
    releaser.start()  # closing an iteration waits for its thread
    with pytest.raises(DataError, match=f"sample {bad} of the training data was not done"):
        next(batches)
    releaser.join()


def test_a_closed_iteration_leaves_the_pool_to_the_next() -> None:
    """As after a repair in place: the processes stay, and what was begun is dropped."""
    loader = make_loader(lambda index: index)
    batches = loader.steps(4)
    next(batches)
    pids = [it.number for it in loader._reader._pool._processes]  # type: ignore[union-attr]
    assert [sample for batch in loader.steps(2) for sample in batch] == indices(0, 16)
    assert pids == [it.number for it in loader._reader._pool._processes]  # type: ignore[union-attr]
    loader.close()


def test_fifty_rebuilds_leave_nothing() -> None:
    """Each ends in the middle of samples; one in three without `close`."""
    own, server = psutil.Process(), loader_server()

    def count() -> tuple[Any, ...]:
        gc.collect()
        both = own, psutil.Process(server.pid)
        shared = [sum("/dev/shm" in it.path for it in process.memory_maps()) for process in both]
        files = [process.num_fds() for process in both]
        return files, shared, len(own.children(recursive=True)), own.num_threads()

    next(make_loader(lambda index: index).steps(1))
    while (before := count()) != count():  # the server closes a file after it has answered
        time.sleep(0.1)
    for number in range(50):
        loader = make_loader(lambda index: index)
        batches = loader.steps(9)
        assert next(batches) == indices(0, 4)
        assert 1 <= len(psutil.Process(server.pid).children()) <= 2  # the other may be to start
        if number % 3:
            loader.close()
        del loader, batches  # no cycle holds them
    until_s = time.monotonic() + END_S
    while count() != before and time.monotonic() < until_s:
        time.sleep(0.1)
    assert count() == before


RANK = """
import subprocess, sys
from rayzero.engine.config.sections import LoaderConfig
from rayzero.engine.data.loader_pool import LoaderPool

def make(path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    with open(path, "w") as file:
        print(child.pid, file=file)
    return sum(iter(int, 1))  # holds the interpreter's lock

pool = LoaderPool(make, 0, LoaderConfig(num_workers=2))
pool.take(pool.submit(0, sys.argv[1:3]), lambda: None)
"""


@pytest.mark.parametrize("victim", ["rank", "server"])
def test_processes_end_with_their_parents(victim: str, tmp_path: Path) -> None:
    """Also those that hang in code that holds the interpreter's lock."""
    paths = [tmp_path / "0", tmp_path / "1"]
    rank = subprocess.Popen([sys.executable, "-c", RANK, *map(str, paths)], stderr=subprocess.PIPE)
    until_s = time.monotonic() + END_S
    while not all(it.exists() and it.read_text().endswith("\n") for it in paths):
        assert rank.poll() is None
        assert time.monotonic() < until_s
        time.sleep(0.05)
    (server,) = psutil.Process(rank.pid).children()
    processes = server.children()
    assert len(processes) == 2
    below = [child for it in processes for child in it.children()]
    assert len(below) == 2
    (rank if victim == "rank" else server).kill()
    ended = [server, *processes] + (below if victim == "rank" else [])
    _, alive = psutil.wait_procs(ended, END_S)
    if victim == "server":
        for process in below:  # the kernel ends the server's processes, not what they have started
            process.kill()
    assert alive == []
    _, errors = rank.communicate(timeout=END_S)
    assert victim == "rank" or "the server of the loader's processes" in errors.decode()


def test_pool_in_another_thread_waits_no_longer_than_its_check() -> None:
    pool = LoaderPool(lambda raw: time.sleep(1000), 0, LoaderConfig(num_workers=1))
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) > 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        pool.take(pool.submit(0, [1]), check)
    pool.close()
