"""Benchmarks: each is a module with a command line, prints a table, and writes `--json PATH`.

They measure and never fail for being slow; what must hold is a test.
"""
