"""The GPU workers: Ray actors, their training threads and process-group generations.

Imports `rayzero.engine`, never `rayzero.orchestrator`. `ray` is imported by the actors and `notice`
only, and everything behind them can be driven in a test without Ray. This file imports nothing.
"""
