"""Checkpoints of models whose weights are mostly frozen, as with LoRA, by `save_checkpoint`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero.deepspeed.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from rayzero.engine.checkpoint.catalogue import prune_checkpoints
from rayzero.engine.checkpoint.reader import CheckpointSource
from rayzero.engine.checkpoint.verify import verify_checkpoint
from rayzero.engine.errors import DataError
from tests.support.ranks import run_ranks

WIDTH, RANK, ROWS = 448, 32, 6
ADAPTER_BYTES = 2 * 2 * WIDTH * RANK * 8
STATE_BYTES = 3 * ADAPTER_BYTES  # with AdamW's two averages


class Adapted(nn.Module):
    """A frozen weight of 1.6 MB with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.a = nn.Linear(WIDTH, RANK, bias=False)
        self.b = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)))


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.Sequential(Adapted(), Adapted()).double()

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.blocks(x).square().mean()
        return loss


def make_engine(stage: int, model: nn.Module, parameters: Any = None) -> rayzero.Engine:
    return rayzero.initialize(
        model=model,
        model_parameters=parameters,
        config={
            "train_batch_size": ROWS,
            "gradient_clipping": 0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )[0]


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).double()


def train(engine: rayzero.Engine, steps: range) -> None:
    for step in steps:
        engine.backward(engine(batch(step).chunk(engine.world_size)[engine.rank]))
        engine.step()


def reference(steps: int, *, thawed: str = "") -> dict[str, Tensor]:
    """Plain PyTorch's weights. From the third step on the first base is trained, too, if `thawed`:
    its state begins at zero, in a group of its own at step 0, otherwise at its group's step."""
    model = Model(0)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    base = model.blocks[0].base
    for step in range(steps):
        if thawed and step == 2:
            base.requires_grad_(True)
            optimizer.add_param_group({"params": [base.weight]})
            if thawed != "own group":
                zeros = [torch.zeros_like(base.weight) for _ in range(2)]
                state = {"step": torch.tensor(2.0), "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}
                optimizer.state[base.weight] = state
        optimizer.zero_grad()
        model(batch(step)).backward()
        optimizer.step()
    return model.state_dict()


def check(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert float((state[name] - value).abs().max()) < 1e-6, name  # `state` is fp32


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def train_and_save(rank: int, world: int, stage: int, steps: range, folder: str) -> None:
    engine = make_engine(stage, Model(steps.start))
    if steps.start:
        engine.load_checkpoint(folder)
    for step in steps:
        train(engine, range(step, step + 1))
        engine.save_checkpoint(folder)


@pytest.mark.parametrize("stage", [0, 3])
def test_later_checkpoints_have_the_trained_share_only(stage: int, tmp_path: Path) -> None:
    run_ranks(2, train_and_save, stage, range(2), str(tmp_path))
    first = disk_bytes(tmp_path)
    run_ranks(2, train_and_save, stage, range(2, 4), str(tmp_path))
    written = (disk_bytes(tmp_path) - first) / 2
    assert written < 1.05 * STATE_BYTES, written / STATE_BYTES
    assert len(list((tmp_path / "base").iterdir())) == 2
    for step in (3, 4):  # 4: also of ranks that have loaded
        assert verify_checkpoint(str(tmp_path / f"global_step{step}")) == []
        check(
            get_fp32_state_dict_from_zero_checkpoint(tmp_path, f"global_step{step}"),
            reference(step),
        )


def test_resumes_at_other_stages_and_worlds(tmp_path: Path) -> None:
    for step, (stage, world) in enumerate([(3, 2), (0, 1), (1, 3), (2, 2), (3, 3), (0, 2)]):
        run_ranks(world, train_and_save, stage, range(step, step + 1), str(tmp_path))
        check(get_fp32_state_dict_from_zero_checkpoint(tmp_path), reference(step + 1))


def train_more(
    rank: int, world: int, stage: int, folder: str, steps: range, thawed: str
) -> dict[str, Tensor]:
    """Continues with the first block's base trained as well."""
    model = Model(7)
    base = model.blocks[0].base.requires_grad_(True)
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": [p for p in trained if p is not base.weight]}, {"params": [base.weight]}]
    engine = make_engine(stage, model, groups if thawed == "own group" else trained)
    engine.load_checkpoint(folder)
    train(engine, steps)
    engine.save_checkpoint(folder)
    return engine.state_dict()


@pytest.mark.parametrize("thawed", ["own group", "its group"])
@pytest.mark.parametrize("stage", [0, 3])
def test_weight_that_is_trained_later(stage: int, thawed: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    run_ranks(2, train_and_save, stage, range(2), folder)
    for steps in (range(2, 3), range(3, 4)):  # with its own checkpoint in between
        states = run_ranks(2, train_more, stage, folder, steps, thawed)
    check(states[0], reference(4, thawed=thawed))
    run_ranks(2, train_and_save, stage, range(4, 5), folder)  # frozen again
    check(
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "global_step2", lazy_mode=True),
        reference(2),
    )


def test_damaged_or_missing_base_is_written_again(tmp_path: Path) -> None:
    engine = make_engine(0, Model(0))
    train(engine, range(1))
    engine.save_checkpoint(tmp_path)
    (base,) = (tmp_path / "base").iterdir()
    raw = base.read_bytes()
    base.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    train(engine, range(1, 2))
    engine.save_checkpoint(tmp_path)
    assert len(list((tmp_path / "base").iterdir())) == 2, "a file of the right size was trusted"
    assert verify_checkpoint(str(tmp_path / "global_step2")) == []
    assert verify_checkpoint(str(tmp_path / "global_step1")) != []
    with pytest.raises(DataError, match=base.name):
        make_engine(0, Model(1)).load_checkpoint(tmp_path, "global_step1")
    base.unlink()
    with pytest.raises(DataError, match=rf"(?s){base.name} is missing.*copy base/"):
        make_engine(0, Model(1)).load_checkpoint(tmp_path, "global_step1")


def test_base_lives_as_long_as_a_checkpoint_that_uses_it(tmp_path: Path) -> None:
    engine = make_engine(0, Model(0))
    for step in range(2):
        train(engine, range(step, step + 1))
        engine.save_checkpoint(tmp_path)
    (old,) = (tmp_path / "base").iterdir()
    shutil.rmtree(tmp_path / "global_step1")
    with torch.no_grad():
        engine.module.blocks[0].base.weight.mul_(2)
    for step in (2, 3):
        train(engine, range(step, step + 1))
        engine.save_checkpoint(tmp_path)
    assert old.exists(), "global_step2 uses it"
    source = CheckpointSource(str(tmp_path / "global_step2"))
    source.check_sizes()
    source.close()
    prune_checkpoints(str(tmp_path), keep=1)
    assert old.exists(), "prune removes only what no folder uses, whatever its name"
    shutil.rmtree(tmp_path / "global_step2")
    train(engine, range(4, 5))
    engine.save_checkpoint(tmp_path)
    assert not old.exists()
    assert len(list((tmp_path / "base").iterdir())) == 1
