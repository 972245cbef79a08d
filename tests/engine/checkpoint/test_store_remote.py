"""Checkpoints on S3, against a moto server in a separate process.

Requires `pip install 'moto[s3]' flask flask-cors`, in this environment or any on PATH.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from pyarrow import fs

from rayzero.engine.checkpoint.catalogue import list_checkpoints, newest_complete, prune_checkpoints
from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.format import BLOCK_BYTES
from rayzero.engine.checkpoint.reader import CheckpointSource
from rayzero.engine.checkpoint.store import join_url, open_store
from rayzero.engine.checkpoint.store_remote import RemoteStore
from rayzero.engine.checkpoint.verify import verify_checkpoint
from rayzero.orchestrator.doctor.probes import check_storage
from tests.engine.checkpoint.saving import check_content, read_manifest, save, write_files
from tests.support.bucket import bucket_url

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bucket():
    """The URL of an empty bucket."""
    with bucket_url() as url:
        yield url


@pytest.fixture
def job(bucket, request):
    return join_url(bucket, request.node.name.partition("[")[0])


def save_checkpoint(job: str, step: int) -> str:
    save(job, step)
    return join_url(job, f"step-{step}")


def test_save_list_load_verify_prune(job):
    assert list_checkpoints(job) == []
    for step in (1, 2, 3):
        save_checkpoint(job, step)
    write_files(join_url(job, "step-4"), 4)
    checkpoints = list_checkpoints(job)
    assert [(checkpoint.step, checkpoint.status) for checkpoint in checkpoints] == [
        *((step, "whole") for step in (1, 2, 3)),
        (4, "unfinished"),
    ]
    newest = newest_complete(job)
    assert newest.folder == join_url(job, "step-3")
    check_content(newest.folder, 3)
    assert verify_checkpoint(newest.folder) == []
    assert prune_checkpoints(job, keep=1).removed == (1, 2)
    assert [checkpoint.step for checkpoint in list_checkpoints(job)] == [3, 4]


def test_each_read_is_one_request(job, monkeypatch):
    folder = save_checkpoint(job, 1)
    sizes: list[int] = []
    source = CheckpointSource(folder)
    source.read(0, 0, memoryview(bytearray(1)))
    (reader,) = source._readers.values()
    file = reader._file  # counts the requests to the store
    real = file.read
    monkeypatch.setattr(
        file,
        "read",
        lambda offset, parts: sizes.append(sum(map(len, parts))) or real(offset, parts),
    )
    nbytes = source.block_indexes[0].nbytes
    source.read(0, BLOCK_BYTES, memoryview(bytearray(nbytes - BLOCK_BYTES - 3)))
    assert sizes == [nbytes - BLOCK_BYTES]


def test_verify_names_damaged_files(job):
    folder = save_checkpoint(job, 1)
    first, second = read_manifest(folder).files
    store = open_store(folder)
    raw = bytearray(store.read(first.name))
    raw[-1] ^= 1
    store.replace(first.name, bytes(raw))
    store.remove(second.name)
    problems = {(problem.file, problem.kind) for problem in verify_checkpoint(folder)}
    assert problems == {(first.name, "flipped"), (second.name, "missing")}
    assert newest_complete(job) is None


def test_failed_upload_leaves_no_object(job):
    store = open_store(job)

    def chunks() -> Iterator[memoryview]:
        yield memoryview(bytes(100))
        raise KeyError

    with pytest.raises(KeyError):
        store.create("x", chunks())
    assert store.list_folder() == []


def test_find_tells_files_folders_and_neither(job):
    store = open_store(job)
    store.create("folder/file", [memoryview(b"abc")])
    found = store.find("folder/file")
    assert (found.name, found.nbytes, found.is_folder) == ("file", 3, False)
    assert store.find("folder").is_folder
    assert store.find("other") is None


class CorruptingFileSystem:
    """Stores other bytes than were written, as older S3 servers do with chunked uploads."""

    def __init__(self, real: fs.FileSystem) -> None:
        self._real = real

    def __getattr__(self, name: str):
        return getattr(self._real, name)

    def open_output_stream(self, path: str, compression: None):
        stream = self._real.open_output_stream(path, compression=compression)
        stream.write(b"c8\r\n")
        return stream


def test_corrupted_upload_is_an_error(job):
    store = RemoteStore(job)
    store._fs = CorruptingFileSystem(store._fs)
    with pytest.raises(StoreError, match="when_required"):
        store.create("x", [memoryview(bytes(100))])
    with pytest.raises(StoreError, match="returned different bytes"):
        store.replace("manifest.json", b"{}")
    assert [entry.name for entry in store.list_folder()] == ["manifest.json"]


def test_missing_bucket(bucket):
    folder = join_url(bucket.replace("s3://bucket", "s3://other"), "job", "step-1")
    with pytest.raises(StoreError) as caught:
        write_files(folder, 1)
    assert caught.value.kind == "gone"
    assert "s3://other/job/step-1/rank-00000" in caught.value.url


def test_unresponsive_server(monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    url = f"s3://bucket/job?endpoint_override=127.0.0.1:{port}&scheme=http&region=x"
    with pytest.raises(StoreError) as caught:
        open_store(url).list_folder()
    assert caught.value.kind == "slow"


def test_local_and_remote_checkpoints_are_equal(job, tmp_path):
    save_checkpoint(job, 1)
    save(tmp_path, 1)
    local, remote = read_manifest(str(tmp_path / "step-1")), read_manifest(join_url(job, "step-1"))
    assert [file.blocks for file in local.files] == [file.blocks for file in remote.files]


def test_doctor_storage_probe_cleans_up(bucket: str):
    facts = check_storage(join_url(bucket, "doctor"))
    assert facts["nbytes"] > 0
    assert open_store(join_url(bucket, "doctor")).list_folder() == []
