"""Streams: data larger than a disk, read in blocks, each row exactly once at any number of workers.

`block.py` is the interface of a source of blocks; `order.py` and `mixture.py` are pure, and compute
which row is at a position; `cache.py` reads blocks ahead; `rows.py` makes samples and batches of
their rows; `source.py` is the source of a `StepLoader`. `packing.py` makes sequences of documents,
`mapping.py` tokens of texts; `kept_tables.py` keeps indices and made blocks. `readers.py`,
`reader_order.py` and `iterable_source.py` do the same for iterables, which have no blocks.
Only `rows.py`, and what imports it, imports torch. This file imports nothing.
"""
