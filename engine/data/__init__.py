"""Training data: the order of samples, each rank's part of a step, and loading.

`sampling.py` is pure (no torch): the global order, a rank's part of a step, and the job's progress.
`sample_source.py` is what a loader reads, `dataset.py` Parquet token shards. `loader.py` yields
micro-batches, read ahead by `prefetch.py`: `reading.py` makes them, with samples of the thread or
of `loader_pool.py`'s processes. `sample_ledger.py` records the consumed samples and checks them
against the order. This file imports nothing.
"""
