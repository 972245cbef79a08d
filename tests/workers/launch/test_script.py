"""Scripts that workers run as `__main__`: how they are entered, left, and entered again."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

import rayzero.data
from rayzero.engine.checkpoint.reader import CheckpointSource
from rayzero.workers.messages import (
    Crashed,
    LogLine,
    WentBack,
)
from tests.support.nccl_like.settings import from_environment
from tests.support.scripts import run_script
from tests.workers.event_controller import Event, EventController, fault
from tests.workers.launch.scripts.common import Blocks
from tests.workers.launch.support import (
    SCRIPTS,
    PlainRuns,
    find_problems,
    make_workers,
    weight_difference,
)
from tests.workers.launch.support import read_notes as read
from tests.workers.launch.support import run_script as run
from tests.workers.local_controller import LocalController

pytestmark = pytest.mark.slow
SAMPLES, EPOCHS = 24, 3  # of own_loop.py


def test_killed_script_goes_on_at_its_step(plain_runs: PlainRuns, tmp_path: Path):
    plain, killed = plain_runs("own_loop.py"), tmp_path / "killed"
    run(killed, "own_loop.py", "--kill-at", "8")
    assert (killed / "killed").exists()
    assert weight_difference(plain, killed) <= 1e-12
    # No finished step is done again, and every sample is used once an epoch.
    own, lost = (read(killed, "steps", rank) for rank in (0, 1))
    again = steps_done_again([step for step, _ in own])
    own = [it for it, after in zip_longest(own, own[1:]) if not after or it[0] != after[0]]
    assert [step for step, _ in own] == list(range(1, 19))
    counted = own + [it for it in lost if it[0] not in again]
    assert count_samples(counted) == dict.fromkeys(range(SAMPLES), EPOCHS)
    assert len(read(killed, "entries", 0)) == 1, "entered once"
    assert read(killed, "exits") == ["atexit"]


def count_samples(steps: list[Any]) -> Counter[int]:
    return Counter(index for _, indices in steps for index in indices)


def test_killed_script_with_a_loop_of_its_own_resumes_from_its_own_checkpoint(
    plain_runs: PlainRuns, tmp_path: Path
):
    """The job goes back with it, and is told: in the history that counts each step is once. Its own
    schedule goes back, too."""
    plain, killed = plain_runs("own_loop.py", "--save-every", "5"), tmp_path / "killed"
    controller = run(killed, "own_loop.py", "--save-every", "5", "--kill-at", "8")
    first, second = read(killed, "entries")[:2]
    assert first == second  # the survivor's: nothing of the first entry is left
    own = SCRIPTS / "own_loop.py"
    assert (first["name"], first["file"], first["path"]) == ("__main__", str(own), str(SCRIPTS))
    assert (first["handlers"], first["pickled"], first["left"]) == (1, True, None)
    assert read(killed, "exits") == ["atexit"]
    assert read(killed, "loaded")[:2] == [[0, 0], [5, 5]]
    told = [it for it in controller._local.seen[0] if isinstance(it, WentBack)]
    assert told == [WentBack(2, 0, 5)]
    steps, lost = (read(killed, "steps", rank) for rank in (0, 1))
    assert [step for step, _ in steps] == [*range(1, 9), *range(6, 19)]
    history = steps[:5] + lost[:5] + steps[8:]
    assert count_samples(history) == dict.fromkeys(range(SAMPLES), EPOCHS)
    assert weight_difference(plain, killed) <= 1e-12
    rates = read(killed, "rates", 0)
    assert rates == [[step, pytest.approx(0.1 * 0.9 ** (step - 1))] for step, _ in steps]


@pytest.mark.parametrize(
    ("calls", "step", "entries"),
    [("none", 8, 3), ("evaluate", 8, 4), ("barrier", 8, 3), ("barrier", 6, 3)],
)
def test_new_worker_calls_nothing_alone_after_epochs_that_were_finished(
    plain_runs: PlainRuns, tmp_path: Path, calls: str, step: int, entries: int
):
    """The survivor stays in its loop if the new worker, which begins with the first epoch, calls
    nothing in vain there, also if the state is that of the epoch's end. The new worker, which is
    rank 0, leaves that epoch's files alone."""
    args = ("--stage", "3", "--calls", calls)
    plain = plain_runs("own_loop.py", *args)
    args = ("--out", str(tmp_path), *args, "--kill-at", str(step))
    with closing(make_workers(tmp_path, "own_loop.py", *args, count=3)) as local:
        local.form(1, [0, 1])
        local.wait_step(0, 1, step)
        assert local.wait_lost() == 1
        local.fence(1, [0])
        files = {file.name: file.read_bytes() for file in tmp_path.glob("*-0.pt")}
        local.finish(2, [2, 0], local.slots(1, 2))
    assert len(read(tmp_path, "entries")) == entries
    assert sorted(files) == ["half-0.pt", "plain-0.pt"]
    assert {name: (tmp_path / name).read_bytes() for name in files} == files
    assert [torch.load(tmp_path / f"plain-{it}.pt") for it in range(3)] == [6, 12, 18]
    assert weight_difference(plain, tmp_path) <= 1e-12


def run_alone(folder: Path, script: str, *args: str) -> tuple[Any, list[str]]:
    """How a script with this name, or text, ends on one worker, and what it prints."""
    name = script
    if not script.endswith(".py"):
        name = str(folder / "script.py")
        Path(name).write_text(script)
    with closing(make_workers(folder, name, *args, count=1)) as local:
        local.form(1, [0])
        end = local.wait_end(0, 1)
        return end, [it.text for it in local.seen[0] if isinstance(it, LogLine)]


def test_exit_codes_and_wrong_arguments_are_told_with_their_place(tmp_path: Path):
    end, lines = run_alone(tmp_path, "own_loop.py")
    assert isinstance(end, Crashed)
    assert (end.kind, end.traceback) == ("entrypoint", "")
    assert "own_loop.py: wrong arguments" in end.error
    assert "in main" in end.error
    assert any("required: --out" in line for line in lines)
    end, _ = run_alone(tmp_path, "own_loop.py", "--out", str(tmp_path), "--exit", "7")
    assert isinstance(end, Crashed)
    assert end.kind == "user"
    assert "called sys.exit(7) at " in end.error
    assert "own_loop.py:" in end.error


def test_error_of_a_script_is_told_once_with_its_own_frames(tmp_path: Path):
    end, lines = run_alone(tmp_path, "def half(x):\n    return 1 / x\n\nhalf(0)\n")
    assert isinstance(end, Crashed)
    assert (end.kind, end.error) == ("user", "ZeroDivisionError: division by zero")
    files = [line for line in end.traceback.splitlines() if line.startswith("  File")]
    assert [line.split('"')[1] for line in files] == [str(tmp_path / "script.py")] * 2
    assert not any("Traceback" in line for line in lines)
    end, _ = run_alone(tmp_path, "def half(:\n")
    assert isinstance(end, Crashed)
    assert (end.kind, end.traceback) == ("entrypoint", "")
    assert "script.py:1: invalid syntax" in end.error
    end, _ = run_alone(tmp_path, "import sys\nsys.exit('no data')\n")
    assert isinstance(end, Crashed)
    assert "called sys.exit('no data') at " in end.error
    assert "called sys.exit" not in end.traceback, "it is told once"
    files = [line for line in end.traceback.splitlines() if line.startswith("  File")]
    assert [line.split('"')[1] for line in files] == [str(tmp_path / "script.py")]


STOPPED = ("--best", "--epochs", "3", "--stop-at", "12")


@pytest.fixture
def trained(plain_runs: PlainRuns) -> Path:
    """Of the Trainer script, undisturbed; it stops after its second epoch, with the model of step
    4."""
    folder = plain_runs("hf_trainer.py", *STOPPED, count=1)
    assert read(folder, "epoch_ends") == [6, 12]
    assert read(folder, "best") == [str(folder / "output" / "checkpoint-4")]
    return folder


@pytest.mark.parametrize(
    ("where", "evaluated", "entries"),
    [(("--kill-at", "5"), [4], 1), (("--kill-evaluation", "12"), [4, 8], 2)],
)
def test_killed_trainer_goes_on_at_its_step(
    trained: Path, tmp_path: Path, where: tuple[str, ...], evaluated: list[int], entries: int
):
    """An evaluation that has lost a rank's part is done again: the script is entered again."""
    killed = tmp_path / "killed"
    run(killed, "hf_trainer.py", *STOPPED, *where)
    check_continued(trained, killed)
    assert read(killed, "epoch_ends", 0) == [6, 12]
    assert read(killed, "evaluations") == [4, 8, 12, *evaluated]  # rank 1's: the first
    assert len(read(killed, "entries", 0)) == entries
    # Also what the lost rank had a part in: the killed step 5 is not logged before it.
    assert read_log(killed) == read_log(trained)
    saved = [json.loads(it.read_text()) for it in killed.glob("output/*/trainer_state.json")]
    assert sorted(it["global_step"] for it in saved) == [4, 8, 12]
    assert all(it["save_steps"] == 4 for it in saved)


def read_log(folder: Path) -> list[Any]:
    """What Trainer has logged of losses."""
    return [(step, name, pytest.approx(value)) for step, name, value in read(folder, "log")[-1]]


@pytest.mark.parametrize("when", ["before", "after"])
def test_trainer_that_is_killed_at_its_end_ends_with_its_best_model(
    trained: Path, tmp_path: Path, when: str
):
    killed = tmp_path / "killed"
    run(killed, "hf_trainer.py", *STOPPED, "--kill-best", when)
    check_continued(trained, killed)
    assert sorted(read(killed, "epoch_ends")) == [6, 6, 12, 12], "each rank's, once"
    assert read_log(killed) == read_log(trained)


def test_trainer_that_resumed_from_a_checkpoint_goes_on_after_a_kill(
    plain_runs: PlainRuns, tmp_path: Path
):
    args = ("--stage", "3")
    plain, killed = plain_runs("hf_trainer.py", *args), tmp_path / "killed"
    checkpoint = str(plain / "output" / "checkpoint-8")
    run(killed, "hf_trainer.py", *args, "--resume", checkpoint, "--kill-at", "10")
    assert (killed / "killed").exists()
    assert [step for _, step in read(killed, "steps", 0)] == [*range(9, 13)]
    assert weight_difference(plain, killed) <= 1e-9


@pytest.fixture
def accelerated(plain_runs: PlainRuns) -> Path:
    """Of the Accelerate script, undisturbed."""
    return plain_runs("accelerated_loop.py", "--save-at", "4")


@pytest.mark.parametrize("where", [("--kill-at", "8"), ("--save-at", "8", "--kill-save")])
def test_killed_accelerate_loop_goes_on_at_its_step(
    accelerated: Path, tmp_path: Path, where: tuple[str, ...]
):
    killed = tmp_path / "killed"
    controller = run(killed, "accelerated_loop.py", *where)
    check_continued(accelerated, killed)
    in_loop = "--kill-save" not in where  # elsewhere than in a step it is called again
    assert len(read(killed, "entries", 0)) == 2 - in_loop
    assert not [text for text in controller._local.texts(0) if "Warning" in text]
    assert checkpointed_steps(killed, "epoch-") == [6, 12]


def test_accelerate_loop_that_resumed_from_a_checkpoint_goes_on_after_a_kill(
    accelerated: Path, tmp_path: Path
):
    """It loads the checkpoint again, whose schedule and count of batches are those of step 4."""
    killed = tmp_path / "killed"
    args = ("--resume", str(accelerated / "step_4"), "--kill-at", "8", "--numbered")
    run(killed, "accelerated_loop.py", *args)
    assert (killed / "killed").exists()
    steps = [step for _, step in read(killed, "steps", 0)]
    again = steps_done_again(steps)
    assert sorted(steps) == sorted([*range(5, 13), *again])
    rates = read(accelerated, "rates", 0)
    assert read(killed, "rates", 0) == [pytest.approx(rates[it - 1]) for it in steps]
    assert weight_difference(accelerated, killed) <= 1e-9
    assert checkpointed_steps(killed / "checkpoints", "checkpoint_") == [6, 12]


@pytest.mark.parametrize("name", ["hf_trainer.py", "accelerated_loop.py"])
def test_script_without_a_config_equals_ddp_and_goes_on_after_a_kill(name: str, tmp_path: Path):
    """Neither says anything of DeepSpeed or of CPUs. The oracle is the script itself, as
    under torchrun, with torch's DDP."""
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    plain.mkdir()
    done = run_script(str(SCRIPTS / name), "--plain", "--out", str(plain), ranks=2)
    assert done.returncode == 0, done.stderr
    run(killed, name, "--plain", "--kill-at", "5")
    check_continued(plain, killed)
    if name == "hf_trainer.py":
        assert read_log(killed) == read_log(plain)
        before = read(killed, "before")  # it trains, in each entry
        assert before == [pytest.approx(before[0])] * 2
    else:
        norms = read(plain, "norms", 0)
        assert max(norms) > 0.1
        expected = [norms[step - 1] for _, step in read(killed, "steps", 0)]
        assert read(killed, "norms", 0) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "option", "phase"),
    [
        ("accelerated_loop.py", "--generator", "update"),
        ("hf_trainer.py", "", "update"),
        ("hf_trainer.py", "--every 100 --dropout 0.2", "mirror"),
        ("hf_trainer.py", "--every 100 --data stream", "update"),
        ("accelerated_loop.py", "--data stream", "update"),
        ("own_loader.py", "--epochs 2 --dropout 0", "update"),
        ("own_loader.py", "--epochs 2 --dropout 0 --data stream --processes 2", "update"),
        ("own_loader.py", "--epochs 2 --dropout 0", "mirror"),
        ("accelerated_loop.py", "", "mirror"),
        ("accelerated_loop.py", "--dropout 0.2", "mirror"),
    ],
)
def test_loop_stays_while_ranks_are_replaced_and_lost(
    plain_runs: PlainRuns, tmp_path: Path, name: str, option: str, phase: str
):
    """Rank 0 in an epoch, rank 1 in its last step, and one in the second epoch: it is not replaced,
    unless the ranks have to agree on the order; or, if dropout depends on the number of ranks,
    rank 1 in the second epoch, and no other. Each where the others have finished the step before,
    or, in its mirror, this step: the job goes back behind it."""
    args = ("--samples", "32", *option.split())
    plain = plain_runs(name, *args)
    is_scripts = phase == "mirror" and name != "hf_trainer.py"
    drops_out = "dropout 0.2" in option
    agrees = option == "--generator"
    third = 9 if agrees else 11  # the first step of the second epoch: the state is older than that
    # A script cannot go back to an epoch that it has ended.
    second = 11 if drops_out else 7 if is_scripts else 6 if agrees else 8
    events = [
        Event(3, "replace", (fault("kill", 0, 3, phase),)),
        Event(second, "replace", (fault("kill", 1, second, phase),)),
        Event(third, "replace" if agrees else "kill", (fault("kill", 0, third, phase),)),
    ]
    if drops_out:
        events.pop()
    folder = tmp_path / "killed"
    folder.mkdir()
    faults = tuple(it for event in events for it in event.faults)
    with closing(make_workers(folder, name, "--out", str(folder), *args, faults=faults)) as local:
        controller = EventController(local, events, None)
        controller.run(240)
        assert controller.wrong == []
    expected = [2, 2, 2, 2 if agrees else 1][: 1 + len(events)]
    assert [ranks for ranks, _ in controller.starts] == expected
    assert len(read(folder, "entries")) == 4 + agrees, "one of each process"
    if not local.nccl_like:  # there a rank may finish a step that another one loses
        again = [event.step for event in events] if phase == "mirror" else []
        assert find_problems(folder, 16, 32, epochs=2, kills=3, unreported=again) == []
    assert weight_difference(plain, folder) <= 1e-9
    if name == "hf_trainer.py":
        assert read_log(folder) == read_log(plain)
    if "stream" in option:
        check_order_of_stream(folder, 32)


def check_order_of_stream(folder: Path, samples: int) -> None:
    """Each step has the samples at its positions, in the order of the stream alone."""
    order = rayzero.data.stream(Blocks(samples), 3).order(3, 1)  # the seed of the jobs here
    used: dict[int, list[int]] = {}
    for _, step, numbers in sorted(read(folder, "used")):
        used.setdefault(step, []).extend(numbers)
    for step, numbers in used.items():  # of a step that was run again, the last ones
        assert sorted(numbers[-4:]) == sorted(order.indices(4 * step, 4).tolist()), step


ITERABLE = ("--data", "iterable")


def test_accelerate_reads_an_iterable_again_behind_what_is_trained_on(
    plain_runs: PlainRuns, tmp_path: Path
):
    """In its second epoch, which has another order; one rank is left."""
    plain, killed = plain_runs("accelerated_loop.py", *ITERABLE), tmp_path / "killed"
    run(killed, "accelerated_loop.py", *ITERABLE, "--kill-at", "8")
    check_continued(plain, killed)
    assert len(read(killed, "entries", 0)) == 2


def test_trainer_reads_an_iterable_again_in_its_first_epoch(plain_runs: PlainRuns, tmp_path: Path):
    args = (*ITERABLE, "--steps", "12", "--every", "100")
    whole = (*args, "--samples", "48")
    run(tmp_path / "killed", "hf_trainer.py", *whole, "--kill-at", "5")
    assert weight_difference(plain_runs("hf_trainer.py", *whole), tmp_path / "killed") <= 1e-9
    late = find_error(tmp_path / "late", "hf_trainer.py", *args, "--kill-at", "8")
    assert "has ended before step 8" in late
    assert "fix: set train_dataset: rayzero.data.stream(" in late


def find_error(folder: Path, name: str, *args: str) -> str:
    """The error with which a script ends that is run again on what is left of two workers."""
    folder.mkdir()
    with closing(make_workers(folder, name, "--out", str(folder), *args)) as local:
        controller = LocalController(local)
        controller.run(240)
    (wrong,) = controller.wrong
    assert (folder / "killed").exists()
    return wrong


def test_iterable_that_ranks_have_divided_is_refused_on_other_ranks(tmp_path: Path):
    error = find_error(tmp_path / "own", "own_loader.py", *ITERABLE, "--kill", "1", "8")
    assert "Iterable was read by 2 ranks, now there are 1" in error
    assert "fix: the DataLoader's dataset: rayzero.data.stream(" in error


def checkpointed_steps(folder: Path, name: str) -> list[int]:
    saved = [folder / f"{name}{number}" / "pytorch_model" for number in (0, 1)]
    return [CheckpointSource(str(it)).step for it in saved]


def steps_done_again(steps: list[int]) -> list[int]:
    """The step that a loop has counted twice: at most one, on a device that works beside the host.
    There a step ends before the copy of its state is complete, and is reported after that."""
    again = [step for step, after in pairwise(steps) if step == after]
    assert len(again) <= (from_environment() is not None)
    return again


def test_resized_accelerate_loop_leaves_nothing_out(accelerated: Path, tmp_path: Path):
    """A drain ends the script where the next step begins: each step's notes are written."""
    args = ("--out", str(tmp_path), "--pace-s", "0.1")
    with closing(make_workers(tmp_path, "accelerated_loop.py", *args)) as local:
        local.form(1, [0, 1])
        local.wait_step(0, 1, 1)
        local.drain(1, [0, 1], told=[1])
        local.finish(2, [1], local.slots(1, 2))
    assert find_problems(tmp_path, 12, SAMPLES, epochs=2) == []
    assert weight_difference(accelerated, tmp_path) <= 1e-9


def check_continued(plain: Path, killed: Path, steps: int = 12) -> None:
    """The kill has happened, no step was done again, the weights are those without it."""
    assert (killed / "killed").exists()
    done = [step for _, step in read(killed, "steps", 0)]
    again = steps_done_again(done)
    assert done == sorted([*range(1, steps + 1), *again])
    assert find_problems(killed, steps, SAMPLES, epochs=2, unreported=again) == []
    assert weight_difference(plain, killed) <= 1e-9
