"""Whatever a checkpoint's files hold, readers return or raise rayzero's own errors, in bounded time
and memory. RAYZERO_MUTATIONS sets the number of files (see tests/support/mutations.py)."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import rayzero
from rayzero.engine.checkpoint.errors import CheckpointDamagedError
from rayzero.engine.checkpoint.export import export_checkpoint
from rayzero.engine.checkpoint.imports.deepspeed_files import InertObject, load_weights_only
from rayzero.engine.checkpoint.verify import verify_checkpoint
from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.cli.ckpt import list_command
from tests.engine.checkpoint.make_released import CLIENT_STATE, CONFIG, Model, batch
from tests.engine.checkpoint.saving import with_checksum
from tests.support.mutations import mutate_text, mutate_tree, read_mutations

KINDS = ("safetensors", "torch", "dcp")
METADATA_KEYS = (
    "ties",
    "frozen",
    "residual_factor",
    "global_batch",
    "value",
    "dtype",
    "__rayzero__",
)


@pytest.fixture(scope="module")
def engine() -> Any:
    engine, *_ = rayzero.initialize(model=Model(), config=CONFIG)
    return engine


@pytest.fixture(scope="module")
def saved(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    engine.backward(engine(batch(1, 0, 1)))
    engine.step()
    engine.save_checkpoint(str(folder), tag="step-1", client_state=CLIENT_STATE)
    return folder


def read_everywhere(engine: Any, job: Path, target: Path) -> None:
    """As `ckpt ls`, `verify`, `export` and a resume read it; raises the first error."""
    checkpoint, errors = str(job / "step-1"), []
    readers: list[Callable[[], object]] = [
        lambda: list_command.__wrapped__(str(job)),
        lambda: verify_checkpoint(checkpoint),
        lambda: engine.load_checkpoint(str(job), tag="step-1"),
        *(lambda kind=kind: export_checkpoint(checkpoint, str(target), kind) for kind in KINDS),
    ]
    for reader in readers:
        shutil.rmtree(target, ignore_errors=True)
        try:
            reader()
        except RayzeroError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def test_mutated_manifests(engine: Any, saved: Path, tmp_path: Path):
    job = Path(shutil.copytree(saved, tmp_path / "job"))
    manifest = job / "step-1" / "manifest.json"
    original = json.loads(manifest.read_bytes())["checkpoint"]

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.1:
            return with_checksum(mutate_text(json.dumps(original).encode(), rng))
        if rng.random() < 0.5:  # most of the document is ranges and tensors
            small = mutate_tree(original["files"][0]["small"], rng, METADATA_KEYS)
            content = original | {"files": [original["files"][0] | {"small": small}]}
        else:
            content = mutate_tree(original, rng)
        try:
            return with_checksum(content)
        except ValueError:  # JSON has no integers of 5,000 digits
            return make(rng)

    def read(raw: bytes) -> None:
        manifest.write_bytes(raw)
        read_everywhere(engine, job, tmp_path / "out")

    assert read_mutations(make, read, seed=11, sample=60) > 0.1


def test_text_in_place_of_a_number_is_damage(engine: Any, saved: Path, tmp_path: Path):
    job = Path(shutil.copytree(saved, tmp_path / "job"))
    manifest = job / "step-1" / "manifest.json"
    document = json.loads(manifest.read_bytes())["checkpoint"]
    scalars = document["files"][0]["small"]["groups"][0]["scalars"]
    scalars["step"]["value"] = str(int(scalars["step"]["value"]))
    manifest.write_bytes(with_checksum(document))
    with pytest.raises(CheckpointDamagedError, match=r"groups.0.scalars.step"):
        engine.load_checkpoint(str(job), tag="step-1")


def mutated_header(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file with a changed header; its length is right, mostly."""
    end = 8 + int.from_bytes(content[:8], "little")
    if rng.random() < 0.2:
        return mutate_text(content[: end + 8], rng) + content[end + 8 :]
    while True:
        try:
            text = json.dumps(mutate_tree(json.loads(content[8:end]), rng)).encode()
        except ValueError:
            continue
        length = rng.choice([len(text)] * 8 + [len(text) - 1, 2**63, 10**8])
        return length.to_bytes(8, "little") + text + content[end:]


def test_mutated_tensor_headers(tmp_path: Path):
    path, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    tensors = {"a.weight": torch.ones(3, 4), "b": torch.arange(6), "c": torch.ones(5).bfloat16()}
    save_file(tensors, path, {"format": "pt"})
    content = path.read_bytes()
    places = {"weight_map": {"a.weight": path.name, "b": path.name}}

    def make(rng: random.Random) -> tuple[bytes, bytes | None]:
        with_index = rng.random() < 0.3
        try:
            text = json.dumps(mutate_tree(places, rng)).encode() if with_index else None
        except ValueError:
            text = b"[" * 100_000
        return content if with_index else mutated_header(content, rng), text

    def read(files: tuple[bytes, bytes | None]) -> None:
        path.write_bytes(files[0])
        index.unlink(missing_ok=True)
        if files[1] is not None:
            index.write_bytes(files[1])
        for kind in KINDS:
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            export_checkpoint(str(tmp_path), str(tmp_path / "out"), kind)

    assert read_mutations(make, read, seed=12, sample=200) > 0.1


def odd_tensors() -> list[torch.Tensor]:
    base = torch.ones(64)
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    return [
        torch.ones(1).expand(2**40),
        torch.as_strided(base, (2**20, 2**20), (0, 0)),
        *(base[::2], base[:7], base.to_sparse(), base.bool(), base.to(torch.complex64), quantized),
        *(torch.empty(2**40, device="meta"), torch.ones(()), torch.ones(0), torch.ones(2, 3)),
        *(base.clone().requires_grad_(), torch._neg_view(base), base.to(torch.float8_e4m3fn)),
    ]


def to_tree(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The content of a file as `mutate_tree` changes it. Tensors become names, and objects of
    DeepSpeed's classes their fields."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().clone())
        return f"tensor {len(tensors) - 1}"
    if isinstance(value, InertObject):
        return to_tree(value.fields, tensors)
    if isinstance(value, dict):
        return {key: to_tree(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_tree(item, tensors) for item in value]
    return str(value) if isinstance(value, torch.dtype) else value


def from_tree(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, str) and value.startswith("tensor ") and value[7:].isdecimal():
        return tensors[int(value[7:]) % len(tensors)]
    if isinstance(value, dict):
        return {key: from_tree(item, tensors) for key, item in value.items()}
    return [from_tree(item, tensors) for item in value] if isinstance(value, list) else value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["stage1-fp32", "stage2-fp16", "stage3-bf16-3-ranks"])
def test_mutated_deepspeed_checkpoints(name: str, unpacked: Path, tmp_path: Path):
    folder = Path(shutil.copytree(unpacked / name, tmp_path / "job"))
    originals = {path: path.read_bytes() for path in sorted(folder.glob("*/*.pt"))}
    tensors: list[torch.Tensor] = []
    trees = {path: to_tree(load_weights_only(path), tensors) for path in originals}

    def make(rng: random.Random) -> tuple[Path, bytes]:
        path, kind, chosen = rng.choice(list(originals)), rng.random(), [*tensors]
        if kind < 0.2:
            return path, mutate_text(originals[path], rng)
        if kind < 0.5:
            for _ in range(len(tensors) // 4):
                chosen[rng.randrange(len(tensors))] = rng.choice(odd_tensors())
        tree = mutate_tree(trees[path], rng) if kind >= 0.45 else trees[path]
        buffer = BytesIO()
        try:
            torch.save(from_tree(tree, chosen), buffer)
        except RecursionError:  # no pickle is nested that deeply
            return make(rng)
        return path, buffer.getvalue()

    def read(file: tuple[Path, bytes]) -> None:
        try:
            file[0].write_bytes(file[1])
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            kind = KINDS[len(file[1]) % len(KINDS)]
            export_checkpoint(str(folder), str(tmp_path / "out"), kind)
        finally:
            file[0].write_bytes(originals[file[0]])

    assert read_mutations(make, read, seed=13, sample=40) > 0.1
