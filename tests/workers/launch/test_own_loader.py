"""Scripts that loop over a torch DataLoader of their own, as if they ran once."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from rayzero.engine.checkpoint.reader import CheckpointSource
from rayzero.workers.messages import Crashed, Finished, Stopped
from tests.workers.launch.support import find_problems, make_workers, read_notes, weight_difference

pytestmark = pytest.mark.slow
SAMPLES, STEPS_OF_EPOCH, EPOCHS = 24, 6, 4  # of own_loader.py
STEPS = STEPS_OF_EPOCH * EPOCHS


def run(folder: Path, *args: str, killed: int | None = None, size: int = 2) -> None:
    """Runs the script on two workers. The killed one's rank is a new worker's, in as many ranks; or
    `size` tells how many go on."""
    folder.mkdir()
    with closing(
        make_workers(folder, "own_loader.py", "--out", str(folder), *args, count=3)
    ) as local:
        local.form(1, [0, 1])
        members, generation = [0, 1], 1
        if killed is not None:
            assert any(loss.worker == killed for loss in local.vault.poll(120.0))
            survivor = 1 - killed
            local.workers[survivor].call("fence", 1)
            assert isinstance(local.wait_end(survivor, 1), Stopped | Crashed)
            members = [2 if rank == killed else rank for rank in (0, 1)]
            members = members if size == 2 else [survivor]
            generation = 2
            has_state = bool(local.vault.inventory())
            local.form(2, members, local.slots(1, 2) if has_state else None)
        for index in members:
            end = local.wait_end(index, generation)
            assert isinstance(end, Finished), local.texts(index)


@pytest.fixture(scope="module", params=["distributed", "part"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("plain") / request.param
    run(folder, "--data", request.param)
    return request.param, folder


@pytest.mark.parametrize(
    ("rank", "step"),
    [(0, 8), (1, STEPS_OF_EPOCH), (1, 2 * STEPS_OF_EPOCH - 1), (0, 0)],
    ids=["within an epoch", "first step of an epoch", "last step of an epoch", "first step"],
)
def test_loop_goes_on_where_it_is(
    plain: tuple[str, Path], tmp_path: Path, rank: int, step: int
) -> None:
    data, undisturbed = plain
    folder = tmp_path / "killed"
    run(folder, "--data", data, "--kill", str(rank), str(step), killed=rank)
    assert (folder / "killed").exists()
    # The step before is done again if it was not in the vault when its rank was killed.
    assert find_problems(folder, STEPS, SAMPLES, EPOCHS, unreported=[step]) == []
    assert weight_difference(undisturbed, folder) <= 1e-9
    entries = [len((folder / f"entries-{it}").read_text().splitlines()) for it in (0, 1)]
    assert entries[1 - rank] == (1 if step else 2), "of the survivor"
    assert entries[rank] == 2
    rates = {tuple(it) for it in read_notes(folder, "rates")}
    assert rates == {tuple(it) for it in read_notes(undisturbed, "rates")}


@pytest.mark.parametrize("args", [("--habit", "changes"), ("--processes", "1")])
def test_batches_are_yielded_again_as_they_were(tmp_path: Path, args: tuple[str, str]) -> None:
    """Also where the script changes them in place, and where processes load them."""
    run(tmp_path / "plain", *args)
    run(tmp_path / "killed", *args, "--kill", "1", "8", killed=1)
    assert find_problems(tmp_path / "killed", STEPS, SAMPLES, EPOCHS, unreported=[8]) == []
    assert weight_difference(tmp_path / "plain", tmp_path / "killed") <= 1e-9
    assert len((tmp_path / "killed/entries-0").read_text().splitlines()) == 1


@pytest.mark.parametrize("step", [8, 2 * STEPS_OF_EPOCH])
def test_files_of_finished_epochs_are_kept(tmp_path: Path, step: int) -> None:
    """Of the script's own and of the engine, also where rank 0 is new; those of others are written
    once."""
    run(tmp_path / "plain", "--save")
    run(tmp_path / "killed", "--save", "--kill", "0", str(step), killed=0)
    for epoch in range(EPOCHS):
        plain, killed = (
            torch.load(tmp_path / name / f"plain-{epoch}.pt", weights_only=True)
            for name in ("plain", "killed")
        )
        for name, value in plain.items():
            assert torch.allclose(value, killed[name], rtol=0, atol=1e-9), (epoch, name)
        saved = CheckpointSource(str(tmp_path / "killed/saved" / f"epoch{epoch}"))
        assert saved.step == STEPS_OF_EPOCH * (epoch + 1)
        saved.close()


@pytest.mark.parametrize(
    ("data", "samples", "entries"),
    [("distributed", 24, 1), ("distributed", 26, 1), ("part", 24, 2)],
    ids=["epochs of whole steps", "a step over two epochs", "another sampler"],
)
def test_batches_are_cut_for_other_numbers_of_ranks_by_a_sampler(
    tmp_path: Path, data: str, samples: int, entries: int
) -> None:
    """By a DistributedSampler. Any other script is entered again, and begins where the job is."""
    args = ("--data", data, "--samples", str(samples), "--kill", "1", "8")
    run(tmp_path / "killed", *args, killed=1, size=1)
    steps = samples * EPOCHS // 4
    problems = find_problems(tmp_path / "killed", steps, samples, EPOCHS, unreported=[8])
    if data == "distributed":  # a part of one rank is another one than of two
        assert problems == []
    assert len((tmp_path / "killed/entries-0").read_text().splitlines()) == entries
    rates = dict(read_notes(tmp_path / "killed", "rates"))
    assert rates == {step: pytest.approx(0.05 * 0.97**step) for step in range(1, steps + 1)}


@pytest.mark.parametrize("habit", ["asks", "ahead"])
def test_script_that_is_ahead_or_asks_for_its_place_is_entered_again(
    tmp_path: Path, habit: str
) -> None:
    run(tmp_path / "killed", "--habit", habit, "--kill", "1", "8", killed=1)
    for rank in (0, 1):
        assert len((tmp_path / f"killed/entries-{rank}").read_text().splitlines()) == 2
