"""Stores: durable and atomic writes, errors, and names that cannot escape the folder."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.checkpoint import store_local
from rayzero.engine.checkpoint.catalogue import (
    list_checkpoints,
    newest_complete,
    prune_checkpoints,
)
from rayzero.engine.checkpoint.errors import CheckpointDamagedError, StoreError
from rayzero.engine.checkpoint.format import is_safe_name
from rayzero.engine.checkpoint.imports.deepspeed_files import find_step_folder
from rayzero.engine.checkpoint.manifest import make_manifest
from rayzero.engine.checkpoint.reader import CheckpointSource
from rayzero.engine.checkpoint.store import is_remote, join_url, open_store, split_url
from rayzero.engine.checkpoint.store_local import LocalStore
from rayzero.engine.checkpoint.store_remote import RemoteReadStream
from rayzero.engine.checkpoint.verify import _verify_file, verify_checkpoint
from rayzero.engine.checkpoint.writer import commit_checkpoint
from rayzero.engine.checkpoint_io import check_tag, resolve_checkpoint
from rayzero.engine.errors import ConfigError, DataError
from tests.engine.checkpoint.saving import save, write_files


def test_local_store(tmp_path):
    store = open_store(str(tmp_path / "a" / "b"))
    assert store.list_folder() == []
    store.replace("c/x", b"one")
    store.replace("c/x", b"two!")
    assert store.read("c/x") == b"two!"
    ((entry,), (folder,)) = store.list_folder("c"), store.list_folder()
    assert (entry.name, entry.is_folder, entry.nbytes) == ("x", False, 4)
    assert abs(entry.modified_s - os.stat(tmp_path / "a/b/c/x").st_mtime) < 1e-6
    assert (folder.name, folder.is_folder, folder.nbytes) == ("c", True, 0)
    stream = store.open("c/x")
    first, second = bytearray(1), bytearray(9)
    assert stream.read(1, [memoryview(first), memoryview(second)]) == 3
    assert (first, second[:2]) == (b"w", b"o!")
    stream.close()
    stream.close()
    store.remove_folder("c")
    assert store.list_folder("c")
    store.remove("c/x")
    store.remove("c/x")
    store.remove_folder("c")
    assert store.list_folder() == []


def test_read_of_a_remote_file_fills_its_parts_in_turn():
    stream = RemoteReadStream(pyarrow.BufferReader(b"two!"), "s3://bucket/x")
    parts = [bytearray(1), bytearray(1), bytearray(9)]
    assert stream.read(1, [memoryview(part) for part in parts]) == 3
    assert parts == [b"w", b"o", b"!" + bytes(8)]


def test_find_tells_files_folders_and_neither(tmp_path):
    store = LocalStore(tmp_path)
    store.create("folder/file", [memoryview(b"abc")])
    found = store.find("folder/file")
    assert [found] == store.list_folder("folder")
    assert store.find("folder").is_folder
    assert store.find("other") is None
    assert store.find("folder/file/below") is None


def test_short_reads_are_continued(tmp_path, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(
        store_local.os, "preadv", lambda fd, parts, offset: real(fd, [parts[0][:3]], offset)
    )
    store = open_store(str(tmp_path))
    store.replace("x", bytes(range(20)))
    parts = [memoryview(bytearray(size)) for size in (4, 1, 9)]
    stream = store.open("x")
    assert stream.read(2, parts) == 14
    assert b"".join(parts) == bytes(range(2, 16))
    stream.close()


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(store_local.os, "write", lambda fd, data: real(fd, data[:5000]))
    save(tmp_path, 1)
    assert verify_checkpoint(str(tmp_path / "step-1")) == []


def test_failed_create_leaves_no_file(tmp_path):
    store = open_store(str(tmp_path))
    store.replace("x", b"old")

    def chunks() -> Iterator[memoryview]:
        yield memoryview(b"new")
        raise KeyError

    with pytest.raises(KeyError):
        store.create("x", chunks())
    assert store.read("x") == b"old"
    assert [entry.name for entry in store.list_folder()] == ["x"]


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, "full"),
        (errno.EDQUOT, "full"),
        (errno.EROFS, "forbidden"),
        (errno.EACCES, "forbidden"),
        (errno.ESTALE, "gone"),
        (errno.ETIMEDOUT, "slow"),
        (errno.EIO, "other"),
    ],
)
@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_errors_have_kind_path_and_fix(tmp_path, monkeypatch, number, kind, call):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(store_local.os, call, fail)
        with pytest.raises(StoreError) as caught:
            write_files(str(tmp_path / "step-2"), 2)
    error = caught.value
    assert error.kind == kind
    assert str(tmp_path / "step-2") in error.seen
    assert os.strerror(number) in error.seen
    assert "checkpoint.path" in error.fix
    assert list((tmp_path / "step-2").iterdir()) == []
    assert newest_complete(str(tmp_path)).step == 1
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.kind, copy.url, str(copy)) == (error.kind, error.url, str(error))


def test_job_folder_is_a_file(tmp_path):
    (tmp_path / "job").write_text("")
    with pytest.raises(StoreError) as caught:
        save(tmp_path / "job", 1)
    assert caught.value.kind == "gone"


def test_commit_requires_files_of_all_nodes(tmp_path):
    """Fails if nodes write to local disks under the same path."""
    files = write_files(str(tmp_path / "step-1"), 1)
    (tmp_path / "step-1" / files[1].name).unlink()
    with pytest.raises(StoreError, match=r"1 of 2 files.*all nodes must share") as caught:
        commit_checkpoint(str(tmp_path / "step-1"), make_manifest("job", 1, 1, files))
    assert caught.value.kind == "gone"
    assert newest_complete(str(tmp_path)) is None


def test_join_and_split_url():
    assert join_url("runs", "gpt", "step-1") == "runs/gpt/step-1"
    assert join_url("runs/", "gpt") == "runs/gpt"
    assert join_url("/", "gpt") == "/gpt"
    assert join_url("s3://b/runs?region=x", "gpt") == "s3://b/runs/gpt?region=x"
    assert split_url("runs/gpt/step-1/") == ("runs/gpt", "step-1")
    assert split_url("step-1") == (".", "step-1")
    assert split_url("/step-1") == ("/", "step-1")
    assert split_url("s3://b/gpt/step-1?region=x") == ("s3://b/gpt?region=x", "step-1")
    assert [is_remote(url) for url in ("a", "file:///a", "s3://b")] == [False, False, True]


def test_file_url(tmp_path):
    open_store(f"file://{tmp_path}/a%20b").replace("x", b"1")
    assert (tmp_path / "a b" / "x").read_bytes() == b"1"


@pytest.mark.parametrize(
    ("url", "text"),
    [("s33://bucket/x", "did you mean 's3'"), ("s3://k:v@bucket/x?region=r&bad=1", "bad")],
)
def test_invalid_urls(url, text):
    with pytest.raises(ConfigError, match=text) as caught:
        open_store(url)
    assert "checkpoint.path" in str(caught.value)


def test_local_checkpoints_import_neither_torch_nor_pyarrow():
    script = (
        "import sys\n"
        "import rayzero.engine.checkpoint.writer, rayzero.engine.checkpoint.catalogue\n"
        "import rayzero.engine.checkpoint.reader\n"
        "sys.exit(repr({'torch', 'pyarrow', 'ray', 'numpy'} & set(sys.modules) or ''))\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert process.stderr.strip() in ("", "''")


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_rank_file_that_is_no_regular_file_is_damage(put, tmp_path: Path):
    name = save(tmp_path, 1).files[0].name
    (tmp_path / "step-1" / name).unlink()
    put(tmp_path / "step-1" / name)
    with closing(CheckpointSource(str(tmp_path / "step-1"))) as source:
        with pytest.raises(CheckpointDamagedError, match="is not a regular file"):
            source.read(0, 0, memoryview(bytearray(4)))
        with pytest.raises(CheckpointDamagedError, match="instead of"):
            source.check_sizes()


def test_link_that_leads_nowhere_does_not_hide_checkpoints(tmp_path: Path):
    save(tmp_path, 1)
    (tmp_path / "loop").symlink_to("loop")
    assert [info.step for info in list_checkpoints(str(tmp_path))] == [1]
    assert verify_checkpoint(str(tmp_path / "step-1")) == []


def test_verify_reads_a_large_header_in_parts(tmp_path: Path):
    """A manifest that states 1 TB of header for a sparse file used to allocate it at once."""
    file = save(tmp_path, 1).files[0]
    large = replace(file, nbytes=file.block_index.nbytes + 96 * 2**20)
    with (tmp_path / "step-1" / file.name).open("r+b") as opened:
        opened.truncate(large.nbytes)
    tracemalloc.start()
    problems = list(_verify_file(LocalStore(tmp_path / "step-1"), large, lambda _: None))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert problems
    assert peak < 16 * 2**20


def test_prune_leaves_linked_folders(tmp_path: Path):
    """What lies behind a linked step-10 is not this job's, and does not count."""
    other, job = tmp_path / "other", tmp_path / "job"
    save(other, 10)
    for step in (20, 30):
        save(job, step)
    before = sorted(path.name for path in (other / "step-10").iterdir())
    (job / "step-10").symlink_to(other / "step-10")
    (job / "step-40").symlink_to(other / "step-10")
    result = prune_checkpoints(str(job), 1)
    assert (result.kept, result.removed) == ((30,), (20,))
    assert sorted(path.name for path in (other / "step-10").iterdir()) == before


HOSTILE = ["..", ".", "", "/", "/etc", "../x", "a/../../x", "a//b", "a/", " ", "a\0b", "a\nb"]
HOSTILE += ["..\u200b", "\u202egpj", "\ud800", "x" * 256, ". .", "a/\t/b"]
PARTS = st.sampled_from(["..", ".", "", "/", "a", "step-1", "\0", "\\", "%2e%2e", "~", "é", " "])
NAMES = st.lists(PARTS | st.text(max_size=3), max_size=6).map("/".join) | st.text(max_size=12)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_outside_the_folder_are_rejected(name: str, tmp_path: Path):
    assert not is_safe_name(name)
    with pytest.raises(ConfigError, match="is not a folder's name"):
        check_tag(name)
    (tmp_path / "job").mkdir()
    with pytest.raises(DataError, match="there is no checkpoint"):
        resolve_checkpoint(str(tmp_path / "job"), name)


@pytest.mark.parametrize("name", ["global_step100", "a/b", "v1.2", "é", "..a", "a..", "with space"])
def test_names_inside_the_folder_are_accepted(name: str):
    assert is_safe_name(name)
    assert check_tag(name) == name


@given(NAMES)
def test_safe_names_stay_inside_the_folder(name: str):
    if is_safe_name(name):
        top = "/top/folder"
        assert os.path.normpath(os.path.join(top, name)).startswith(top + "/")
        assert "\0" not in name


@pytest.mark.parametrize("latest", ["../other", "/", ".", "a/../../other"])
def test_latest_file_cannot_escape_the_folder(latest: str, tmp_path: Path):
    """rayzero's and DeepSpeed's: the file comes with the checkpoint and is not trusted."""
    job, other = tmp_path / "job", tmp_path / "other"
    (job / "a").mkdir(parents=True)
    other.mkdir()
    (other / "mp_rank_00_model_states.pt").touch()
    (job / "latest").write_text(latest)
    with pytest.raises(DataError, match="there is no checkpoint"):
        resolve_checkpoint(str(job), None)
    with pytest.raises(DataError, match="which is not a folder in"):
        find_step_folder(job)


def test_replace_does_not_follow_symbolic_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    victim = tmp_path / "victim"
    victim.write_text("original")
    folder = tmp_path / "job"
    folder.mkdir()
    monkeypatch.setattr(store_local, "token_hex", lambda size: "ab" * size)
    (folder / ".latest.abababab.partial").symlink_to(victim)
    with pytest.raises(StoreError):
        LocalStore(folder).replace("latest", b"new")
    assert victim.read_text() == "original"
