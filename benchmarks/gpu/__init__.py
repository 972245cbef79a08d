"""The first ten minutes on a GPU, as one command: `python -m benchmarks.gpu --minutes 10`."""
