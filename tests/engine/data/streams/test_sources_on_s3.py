"""Sources on S3, against a moto server in a separate process."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
from collections.abc import Iterator
from time import monotonic

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayzero.data import blocks
from rayzero.engine.checkpoint.store import join_url, open_store
from rayzero.engine.errors import DataError
from tests.support.bucket import bucket_url
from tests.support.flaky_server import flaky_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with bucket_url() as url:
        yield url


def parquet(rows: list[dict]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=10)
    return sink.getvalue()


def lines(rows: list[dict]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def tar(rows: list[dict]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as file:
        for row in rows:
            member = tarfile.TarInfo(f"{row['x']:05d}.txt")
            member.size = 2000
            file.addfile(member, io.BytesIO(bytes(2000)))
    return sink.getvalue()


ROWS = [{"x": number} for number in range(50)]
FILES = {
    "a.parquet": parquet(ROWS),
    "a.jsonl": lines(ROWS),
    "a.jsonl.gz": gzip.compress(lines(ROWS)),
    "a.tar": tar(ROWS),
    "cat/a.png": b"image",
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("given", ["file", "folder", "pattern", "list"])
def test_rows_index_and_changes(bucket: str, name: str, given: str) -> None:
    folder = f"{name.replace('.', '-').replace('/', '-')}-{given}"
    top = open_store(join_url(bucket, folder))
    top.replace(f"deep/{name}", FILES[name])
    index_dir = join_url(bucket, folder, "_index")
    paths = {
        "file": join_url(bucket, folder, "deep", name),
        "folder": join_url(bucket, folder),
        "pattern": join_url(bucket, folder, "**", f"*.{name.split('.', 1)[1]}"),
        "list": [join_url(bucket, folder, "deep", name)],
    }[given]
    source = blocks(paths, block_bytes=100, index_dir=index_dir)
    again = blocks(paths, block_bytes=100, index_dir=index_dir)
    assert again.fingerprint == source.fingerprint
    rows = [row for block in range(len(source.counts)) for row in again.read(block).to_pylist()]
    if name == "a.tar":
        rows = [{"x": int(row["__key__"])} for row in rows]
    if name == "cat/a.png":
        assert [(row["image"], row["label"]) for row in rows] == [(b"image", 0)]
        assert source.classes == ["deep" if given in ("folder", "pattern") else "cat"]
    else:
        assert rows == ROWS
        assert len(open_store(index_dir).list_folder()) == 1
    assert "secret" not in source.describe(0) + source.name
    top.replace(f"deep/{name}", FILES[name] + b" ")
    with pytest.raises(DataError, match=rf"s3://bucket/{folder}/deep/{name}.* has changed"):
        source.read(0)
    top.remove(f"deep/{name}")
    with pytest.raises(DataError, match="has vanished"):
        source.read(0)


def test_whole_bucket_and_what_is_not_there(bucket: str) -> None:
    open_store(join_url(bucket, "one")).replace("x.ndjson", lines(ROWS))
    assert blocks(bucket, format="json").counts.sum() >= len(ROWS)
    other = bucket.replace("s3://bucket", "s3://other")
    for path in (join_url(bucket, "no"), join_url(bucket, "no", "*.jsonl"), join_url(other, "no")):
        with pytest.raises(DataError, match=r"no files at s3://\w+/no"):
            blocks(path)


@pytest.mark.parametrize("kind", ["500", "reset", "cut", "slow"])
def test_errors_of_the_server_are_retried_within_the_budget(bucket: str, kind: str) -> None:
    port = int(bucket.partition("endpoint_override=127.0.0.1:")[2].partition("&")[0])
    open_store(join_url(bucket, f"flaky-{kind}")).replace("a.parquet", FILES["a.parquet"])
    with flaky_server(port) as server:
        url = bucket.replace(f":{port}&", f":{server.server_port}&")
        source = blocks(join_url(url, f"flaky-{kind}", "a.parquet"), retry_s=20.0)
        server.kind, server.left = kind, 5
        assert source.read(2).to_pylist() == ROWS[20:30]
        assert server.fired[kind] == (1 if kind == "slow" else 5)
        if kind != "500":
            return
        short = blocks(join_url(url, f"flaky-{kind}", "a.parquet"), retry_s=0.3)
        short = pickle.loads(pickle.dumps(short))  # as one that is given to workers
        server.left, since_s = 10**6, monotonic()
        with pytest.raises(DataError, match=rf"flaky-{kind}/a.parquet, row group 3 cannot be read"):
            short.read(3)
        assert monotonic() - since_s < 5  # the SDK's own retries would take 12 s
