"""A materialised Ray dataset as a source of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import xxhash

from rayzero.engine.data.streams.block import BlockSource
from rayzero.engine.data.streams.identity import digest_ends
from rayzero.engine.errors import ConfigError, DataError, first_line, named_errors

TIMEOUT_S = 600.0


def from_ray(dataset: Any, timeout_s: float = TIMEOUT_S) -> BlockSource:
    """Runs a Ray dataset's transforms, on Ray's CPUs, and reads its blocks from the object store.

    Their order is that of the input (`preserve_order`). A job can be resumed if the transforms make
    the same rows again: random ones belong in `rayzero.data.stream(transform=)`. Call it once, in
    the process that submits the job, and pass the source on: a call in each worker would run the
    transforms in each. The blocks live as long as that process; of a dataset that must outlive it,
    or is larger than the object store, write files: `dataset.write_parquet(url)`, then
    `rayzero.data.blocks(url)`.

    Args:
        dataset: a `ray.data.Dataset`.
        timeout_s: how long a read waits for a block.

    Raises ConfigError if it is of another type; DataError if it has no rows.
    """
    if not isinstance(dataset, ray.data.Dataset):
        raise ConfigError(
            f"from_ray got {type(dataset).__name__}", "a ray.data.Dataset", "pass the dataset"
        )
    dataset.context.execution_options.preserve_order = True
    with named_errors(lambda: "the Ray dataset cannot be made", fix="correct its transforms"):
        refs = dataset.materialize().to_arrow_refs()
        # Counted on the nodes where the blocks are: only the counts and digests come here.
        found = ray.get([_count.remote(ref) for ref in refs], timeout=timeout_s)
    counts = np.array([count for count, _ in found], np.int64)
    if not counts.sum():
        raise DataError("the Ray dataset has no rows", "one row or more", "change the dataset")
    blocks = [ref for ref, count in zip(refs, counts, strict=True) if count]
    fingerprint = xxhash.xxh3_128_hexdigest(f"{dataset.schema()} {found}".encode())
    return RayBlocks(blocks, counts[counts > 0], fingerprint, timeout_s)


@dataclass(eq=False)
class RayBlocks:
    """A source of blocks in Ray's object store: references to them, and their counts."""

    refs: Sequence[Any]
    counts: np.ndarray[tuple[int], np.dtype[np.int64]]
    fingerprint: str
    timeout_s: float
    name: str = "ray"

    def read(self, block: int) -> pa.Table:
        """Returns all rows of a block. Thread-safe. Raises DataError, which names the block, if it
        was lost and Ray cannot make it again, or if it does not arrive in time."""
        try:
            return ray.get(self.refs[block], timeout=self.timeout_s)
        except ray.exceptions.RayError as error:
            raise DataError(
                f"{self.describe(block)} cannot be read: {first_line(error)}",
                "blocks in Ray's object store, while the process that made them lives",
                "dataset.write_parquet(url), then rayzero.data.blocks(url)",
            ) from error

    def describe(self, block: int) -> str:
        return f"Ray dataset, block {block}"


@ray.remote(num_cpus=0)
def _count(table: pa.Table) -> tuple[int, str]:
    return len(table), digest_ends(table) if len(table) else ""
