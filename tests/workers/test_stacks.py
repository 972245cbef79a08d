"""Where the training thread hangs: the line of the user's code, if it is in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Event, Thread

import torch

from rayzero.engine.data.loader import StepLoader
from rayzero.engine.data.micro_batches import MicroBatches
from rayzero.engine.data.prefetch import Prefetch
from rayzero.engine.data.sample_source import DatasetSource
from rayzero.engine.data.sampling import StepSplit, TrainingProgress, assign_step
from rayzero.workers.stacks import TRAINING_THREAD, Stacks, read_stacks


class Stuck:
    """A dataset with a sample that never arrives."""

    def __init__(self, sample: int) -> None:
        self.sample = sample
        self.entered = Event()
        self.release = Event()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index == self.sample:
            self.entered.set()
            self.release.wait()
        return index


def wait(stuck: Stuck) -> None:
    stuck.entered.set()
    stuck.release.wait()


def stacks_of(train: Callable[[], object], stuck: Stuck) -> Stacks:
    thread = Thread(target=train, name=TRAINING_THREAD)
    thread.start()
    try:
        assert stuck.entered.wait(60)
        return read_stacks()
    finally:
        stuck.release.set()
        thread.join()


def test_dataset_that_hangs_is_named_with_its_sample() -> None:
    stuck = Stuck(37)
    own = MicroBatches(TrainingProgress(global_batch=2), StepSplit(assign_step(2, 1, 0, 2)))
    loader = StepLoader(DatasetSource(stuck, 0), own)
    stacks = stacks_of(lambda: list(loader.steps(20)), stuck)
    assert stacks.place.startswith(f"{__file__}:")
    assert stacks.place.endswith(", in __getitem__")
    assert stacks.activity == "reading sample 37 of the training data"
    assert stacks.summary == f"at {stacks.place}, {stacks.activity}"
    assert stacks.reads


def test_prompt_that_hangs_is_named() -> None:
    stuck = Stuck(37)

    def source() -> Iterator[list[int]]:
        prompts = DatasetSource(stuck, 0)
        for position in range(40):
            yield prompts.read_samples(position, 1)

    stacks = stacks_of(lambda: list(Prefetch(source())), stuck)
    assert stacks.activity == "reading sample 37 of the training data"


def test_users_own_loop_is_named_and_a_wait_for_ranks_is_not() -> None:
    stuck = Stuck(0)
    stacks = stacks_of(lambda: stuck[0], stuck)
    assert (stacks.place.rpartition(", in ")[2], stacks.activity) == ("__getitem__", "")

    collective = compile("wait()", torch.distributed.__file__, "eval")
    stuck.entered.clear()
    stuck.release.clear()
    stacks = stacks_of(lambda: eval(collective, {"wait": lambda: wait(stuck)}), stuck)
    assert stacks.place.endswith(", in wait"), "a hook of the user's"
    stuck.entered.clear()
    stuck.release.clear()
    names = {"entered": stuck.entered, "release": stuck.release}
    waits = compile("entered.set() or release.wait()", torch.distributed.__file__, "eval")
    assert stacks_of(lambda: eval(waits, names), stuck).place == ""
