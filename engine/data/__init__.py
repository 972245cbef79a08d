"""Training data: the order of samples, each rank's part of a step, and loading.

`sampling.py` is pure (no torch): the global order, a rank's part of a step, and the job's progress.
`sample_source.py` is the interface of what a loader reads, `dataset.py` reads Parquet token shards.
`loader.py` yields micro-batches. `reading.py` makes them in the thread of `prefetch.py`; their
samples are made in that thread or in the processes of `loader_pool.py`. `sample_ledger.py` records
the consumed samples and checks them against the order. This file imports nothing.
"""
