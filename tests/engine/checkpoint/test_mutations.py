"""Whatever a checkpoint's files hold, readers return or raise rayzero's own errors, in bounded time
and memory. RAYZERO_MUTATIONS sets the number of files (see tests/support/mutations.py)."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_hexdigest

import rayzero
from rayzero.engine.checkpoint.export import export_checkpoint
from rayzero.engine.checkpoint.reader import verify_checkpoint
from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.cli.ckpt import list_command
from tests.engine.checkpoint.make_released import CLIENT_STATE, CONFIG, Model, batch
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


def report(name: str, counts: Any) -> None:
    print(f"{name}: {counts}")
    assert counts.rejected > counts.documents // 10


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


def with_checksum(content: Any) -> bytes:
    """A manifest with this inner object; the checksum is right."""
    text = json.dumps(content, separators=(",", ":")) if not isinstance(content, bytes) else content
    raw = text if isinstance(text, bytes) else text.encode()
    return b'{"checksum":"%s","checkpoint":%s}\n' % (xxh3_64_hexdigest(raw).encode(), raw)


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

    report("manifests", read_mutations(make, read, seed=11, sample=60))
