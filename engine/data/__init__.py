"""Training data: the order of samples, each rank's part of a step, and loading.

`sampling.py` is pure (no torch): the global order, a rank's part of a step, and the job's progress.
`dataset.py` reads Parquet token shards; `loader.py` yields micro-batches, read ahead by
`prefetch.py`; `sample_ledger.py` records the consumed samples and checks them against the order.
This file imports nothing.
"""
