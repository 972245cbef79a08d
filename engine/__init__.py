"""The ZeRO engine: torch, no Ray.

It runs inside rayzero's workers, under torchrun, inside Ray Train, and alone in one process.
Nothing here imports `rayzero.workers` or `rayzero.orchestrator`. This file imports nothing, so
that `rayzero.engine.errors` and `rayzero.engine.config` cost no torch.
"""
