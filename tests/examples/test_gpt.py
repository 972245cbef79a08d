"""The GPT example: model, data preparation and training function."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

from examples.gpt import prepare as preparation
from examples.gpt import torchrun
from examples.gpt.model import GPT, GPTConfig
from examples.gpt.prepare import assign_split, prepare
from examples.gpt.train import train
from rayzero.engine.config import parse_config
from rayzero.engine.data.dataset import ParquetTokens
from rayzero.engine.errors import DataError

TINY = GPTConfig(context=16, layers=2, width=32, heads=4)


def test_logits_loss_and_size() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    tokens = torch.randint(256, (3, 17))
    assert model(tokens[:, :-1]).shape == (3, 16, 256)
    assert model(tokens[:, :5]).shape == (3, 5, 256)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    assert loss.shape == ()
    assert loss.item() == pytest.approx(torch.log(torch.tensor(256.0)).item(), abs=0.2)
    block = 12 * 32 * 32 + (3 + 1 + 4 + 1) * 32 + 4 * 32  # matrices, their biases, two norms
    assert model.num_parameters() == 256 * 32 + 2 * block + 2 * 32
    untied = GPT(GPTConfig(context=16, layers=2, width=32, heads=4, tie=False))
    assert untied.num_parameters() == model.num_parameters() + 256 * 32


def test_attention_is_causal() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@dataclass(frozen=True)
class ReusableContext(torchrun.Context):
    """A context whose engine outlives a call to `train`, as in a worker."""

    engines: list = field(default_factory=list)

    def initialize(self, **kwargs):
        if not self.engines:
            self.engines.append(super().initialize(**kwargs))
        return self.engines[0]


def test_training_resumes_when_called_again(tmp_path: Path, library: Path, capsys) -> None:
    prepare(tmp_path / "data", library)
    for shards in (tmp_path / "data").glob("*/*.parquet"):  # the test library is too small
        table = pq.read_table(shards)
        pq.write_table(pa.concat_tables([table] * 20), shards)
    args = {"layers": 1, "width": 32, "heads": 2, "context": 16, "data": str(tmp_path / "data")}
    ctx = ReusableContext(args, steps=2, output_dir=tmp_path)
    before = train(ctx)
    longer = dataclasses.replace(ctx, steps=12)
    after = train(longer)
    engine = ctx.engines[0][0]
    assert engine.progress.step == 12
    bits = after["validation_bits_per_byte"]
    assert bits["first"] == before["validation_bits_per_byte"]["first"] == pytest.approx(8, abs=0.5)
    assert bits["last"] < before["validation_bits_per_byte"]["last"]
    assert capsys.readouterr().out.count(" bits per byte") == 3

    model = GPT(GPTConfig(layers=1, width=32, heads=2, context=16))
    missing, unexpected = model.load_state_dict(load_file(after["weights"]), strict=False)
    assert (missing, unexpected) == (["head.weight"], [])
    torch.testing.assert_close(model.norm.weight, engine.state_dict()["norm.weight"])


def test_job_file_and_engine_config_agree() -> None:
    folder = Path(torchrun.__file__).parent
    job = yaml.safe_load((folder / "job.yaml").read_text())
    config = parse_config(folder / job["engine"])
    assert config.scheduler.params["total_num_steps"] == job["steps"]
    assert config.zero_optimization.stage == 2
    GPTConfig(**job["args"])


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small source tree: 60 modules, and files that must be excluded."""
    root = tmp_path / "lib"
    for folder in ("", "json", "test", "json/tests", "site-packages/other", "__pycache__"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for i in range(60):
        (root / f"module_{i:02}.py").write_bytes(b"x = %d\n" % i * (i + 1))
    (root / "json/latin.py").write_bytes(b"# \xe9 is not UTF-8\n")
    (root / "json/notes.txt").write_text("not Python")
    for excluded in (
        "test/a.py",
        "json/tests/b.py",
        "site-packages/other/c.py",
        "__pycache__/d.py",
    ):
        (root / excluded).write_text("excluded")
    return root


def content(out: Path, split: str) -> list[bytes]:
    """The files of a split, from its shards."""
    shards = sorted((out / split).glob("*.parquet"))
    stream = b"".join(bytes(pq.read_table(s)["tokens"].to_numpy()) for s in shards)
    assert stream.endswith(b"\0")
    return stream.split(b"\0")[:-1]


def test_preparation_splits_by_file_and_keeps_every_byte(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "SHARD_TOKENS", 500)
    monkeypatch.setattr(preparation, "ROW_GROUP_TOKENS", 100)
    out = tmp_path / "data"
    meta = prepare(out, library)
    expected = {
        path.relative_to(library).as_posix(): path.read_bytes()
        for path in [*library.glob("*.py"), library / "json/latin.py"]
    }
    for split in ("train", "validation"):
        files = [text for name, text in expected.items() if assign_split(name) == split]
        assert files, "the tree is too small for this hash"
        assert sorted(content(out, split)) == sorted(files)
        assert meta["files"][split] == len(files)
        assert meta["tokens"][split] == ParquetTokens(out / split, 8).num_tokens
    assert len(list((out / "train").glob("*.parquet"))) > 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_preparation_is_skipped_when_up_to_date(
    tmp_path: Path, library: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data"
    meta = prepare(out, library)
    shard = out / "train/00000.parquet"
    stamp = shard.stat().st_ino
    capsys.readouterr()
    assert prepare(out, library) == meta
    assert "up to date" in capsys.readouterr().out
    assert shard.stat().st_ino == stamp

    stale = json.loads((out / "meta.json").read_text())
    stale["settings"]["python"] = "2.7.18"
    (out / "meta.json").write_text(json.dumps(stale))
    assert prepare(out, library) == meta
    assert shard.stat().st_ino != stamp


def test_many_may_prepare_at_once(tmp_path: Path, library: Path) -> None:
    for out in (tmp_path / "new", tmp_path / "stale"):
        if out.name == "stale":
            out.mkdir()
            (out / "meta.json").write_text('{"settings": {}}')
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda _, out=out: prepare(out, library), range(8)))
        assert all(result == results[0] for result in results)
        assert len(content(out, "train")) == results[0]["files"]["train"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lib", "new", "stale"]


def test_preparation_deletes_nothing_of_others(tmp_path: Path, library: Path) -> None:
    with pytest.raises(DataError, match="contains other files"):
        prepare(library, library)
    assert (library / "module_00.py").exists()
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="no \\*\\.py files"):
        prepare(tmp_path / "data", tmp_path / "nothing")
    assert not (tmp_path / "data").exists()
    assert prepare(tmp_path / "nothing", library)["files"]["train"] > 0  # empty: it may be used
