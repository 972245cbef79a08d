"""Streams: data larger than a disk, read in blocks, each row exactly once at any number of workers.

`block.py` is what a source is; `order.py`, `mixture.py` are pure: which row is at a position;
`cache.py` reads blocks ahead; `rows.py` makes samples and batches of their rows; `source.py` is the
source of a `StepLoader`; `packing.py` makes sequences of documents, `mapping.py` tokens of texts;
`kept_tables.py` keeps what was found or made.
Nothing but `rows.py`, and what imports it, imports torch. This file imports nothing.
"""
