"""The GPU workers: Ray actors, their training threads and process-group generations.

Imports `rayzero.engine`, never `rayzero.orchestrator`. `ray` is imported by `actor` only, and
everything behind that shell can be driven in a test without Ray. This file imports nothing.
"""
