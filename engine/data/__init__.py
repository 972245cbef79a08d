"""Training data: which samples a rank reads, in which order, and how they reach it.

`order.py` and `split.py` are pure (no torch): the global order of samples and a rank's part of a
step. `progress.py` is where the job stands; `dataset.py` reads Parquet token shards; `loader.py`
hands out micro-batches, read ahead by `prefetch.py`; `ledger.py` writes down which samples were
consumed, and proves the order. This file imports nothing.
"""
