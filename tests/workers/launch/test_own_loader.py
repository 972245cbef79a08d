"""Scripts that loop over a torch DataLoader of their own, as if they ran once."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from rayzero.engine.checkpoint.reader import CheckpointSource
from tests.workers.launch.support import (
    PlainRuns,
    find_problems,
    make_workers,
    read_notes,
    weight_difference,
)

pytestmark = pytest.mark.slow
SAMPLES, STEPS_OF_EPOCH, EPOCHS = 24, 6, 4  # of own_loader.py
STEPS = STEPS_OF_EPOCH * EPOCHS


def run_killed(folder: Path, rank: int, step: int | None, *args: str, size: int = 2) -> Path:
    """Runs the script on two workers. In that step that rank is killed; it is a new worker's then,
    in as many ranks; or `size` tells how many go on. Returns the folder of its notes."""
    folder = folder / "killed"
    folder.mkdir()
    kill = ("--kill", str(rank), str(step)) if step is not None else ()
    args = ("--out", str(folder), *args, *kill)
    with closing(make_workers(folder, "own_loader.py", *args, count=3)) as local:
        local.form(1, [0, 1])
        assert local.wait_lost(120) == rank
        survivor = 1 - rank
        local.fence(1, [survivor])
        members = [survivor]
        if size == 2:
            members.insert(rank, 2)
        local.finish(2, members, local.slots(1, 2) if local.vault.inventory() else None)
    assert (folder / "killed").exists()
    return folder


def entries(folder: Path) -> list[int]:
    """How often each rank's script has been entered."""
    paths = [folder / f"entries-{rank}" for rank in (0, 1)]
    return [len(path.read_text().splitlines()) if path.exists() else 0 for path in paths]


@pytest.mark.parametrize(
    ("data", "rank", "step"),
    [
        ("distributed", 0, 8),
        ("part", 1, STEPS_OF_EPOCH),
        ("distributed", 1, 2 * STEPS_OF_EPOCH - 1),
        ("part", 0, 2 * STEPS_OF_EPOCH - 1),
        ("part", 0, 0),
    ],
    ids=["within an epoch", "first of an epoch", "last of an epoch", "last, part", "first"],
)
def test_loop_goes_on_where_it_is(
    plain_runs: PlainRuns, tmp_path: Path, data: str, rank: int, step: int
) -> None:
    undisturbed = plain_runs("own_loader.py", "--data", data)
    folder = run_killed(tmp_path, rank, step, "--data", data)
    # The step before is done again if it was not in the vault when its rank was killed.
    assert find_problems(folder, STEPS, SAMPLES, EPOCHS, unreported=[step]) == []
    assert weight_difference(undisturbed, folder) <= 1e-9
    entered = entries(folder)
    assert entered[1 - rank] == (1 if step else 2), "of the survivor"
    assert entered[rank] == 2
    rates = {tuple(it) for it in read_notes(folder, "rates")}
    assert rates == {tuple(it) for it in read_notes(undisturbed, "rates")}
    check_evaluations(folder, undisturbed)


def check_evaluations(folder: Path, undisturbed: Path, *epochs: int) -> None:
    """A new rank, whose weights are those of a later step, knows what the ranks have evaluated."""
    expected = dict(read_notes(undisturbed, "evaluations"))
    for epoch, value in read_notes(folder, "evaluations"):
        assert value == pytest.approx(expected[epoch], abs=1e-9) or epoch not in (
            epochs or expected
        )


def test_epoch_is_evaluated_again_by_all_if_a_rank_is_lost_meanwhile(
    plain_runs: PlainRuns, tmp_path: Path
) -> None:
    """The survivor does not decide by its own part of the metric."""
    undisturbed = plain_runs("own_loader.py")
    folder = run_killed(tmp_path, 1, None, "--kill-after", "1")
    check_evaluations(folder, undisturbed)
    assert find_problems(folder, STEPS, SAMPLES, EPOCHS) == []
    assert weight_difference(undisturbed, folder) <= 1e-9
    assert entries(folder) == [2, 2]


@pytest.mark.parametrize("args", [("--habit", "changes"), ("--processes", "1")])
def test_batches_are_yielded_again_as_they_were(
    plain_runs: PlainRuns, tmp_path: Path, args: tuple[str, str]
) -> None:
    """Also where the script changes them in place, and where processes load them."""
    folder = run_killed(tmp_path, 1, 8, *args)
    assert find_problems(folder, STEPS, SAMPLES, EPOCHS, unreported=[8]) == []
    assert weight_difference(plain_runs("own_loader.py", *args), folder) <= 1e-9
    assert entries(folder) == [1, 2]


@pytest.mark.parametrize("step", [8, 2 * STEPS_OF_EPOCH])
def test_files_of_finished_epochs_are_kept(
    plain_runs: PlainRuns, tmp_path: Path, step: int
) -> None:
    """Of the script's own and of the engine, also where rank 0 is new; those of others are written
    once."""
    undisturbed = plain_runs("own_loader.py", "--save")
    folder = run_killed(tmp_path, 0, step, "--save")
    for epoch in range(EPOCHS):
        plain, killed = (
            torch.load(it / f"plain-{epoch}.pt", weights_only=True) for it in (undisturbed, folder)
        )
        for name, value in plain.items():
            assert torch.allclose(value, killed[name], rtol=0, atol=1e-9), (epoch, name)
        saved = CheckpointSource(str(folder / "saved" / f"epoch{epoch}"))
        assert saved.step == STEPS_OF_EPOCH * (epoch + 1)
        saved.close()


@pytest.mark.parametrize(
    ("data", "samples", "entered"),
    [("distributed", 24, 1), ("distributed", 26, 1), ("part", 24, 2)],
    ids=["epochs of whole steps", "a step over two epochs", "another sampler"],
)
def test_batches_are_cut_for_other_numbers_of_ranks_by_a_sampler(
    plain_runs: PlainRuns, tmp_path: Path, data: str, samples: int, entered: int
) -> None:
    """By a DistributedSampler. Any other script is entered again, and begins where the job is."""
    folder = run_killed(tmp_path, 1, 8, "--data", data, "--samples", str(samples), size=1)
    steps = samples * EPOCHS // 4
    if data == "distributed":  # a part of one rank is another one than of two
        assert find_problems(folder, steps, samples, EPOCHS, unreported=[8]) == []
    assert entries(folder)[0] == entered
    if samples == SAMPLES:
        check_evaluations(folder, plain_runs("own_loader.py", "--data", data), 0)
    rates = dict(read_notes(folder, "rates"))
    assert rates == {step: pytest.approx(0.05 * 0.97**step) for step in range(1, steps + 1)}


@pytest.mark.parametrize("habit", ["asks", "ahead"])
def test_script_that_is_ahead_or_asks_for_its_place_is_entered_again(
    tmp_path: Path, habit: str
) -> None:
    assert entries(run_killed(tmp_path, 1, 8, "--habit", habit)) == [2, 2]
