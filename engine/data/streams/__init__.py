"""Streams: data larger than a disk, read in blocks, each row exactly once at any number of workers.

`block.py` is what a source is; `order.py`, `mixture.py` are pure: which row is at a position;
`cache.py` reads blocks ahead; `source.py` is the source of a `StepLoader`; `packing.py` makes
sequences of documents. Nothing here but `source.py` imports torch. This file imports nothing.
"""
