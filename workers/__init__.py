"""The workers: Ray actors, their training threads, and the process group of each generation.

Imports `rayzero.engine`, never `rayzero.orchestrator`. Only the actors and `prestop` import Ray;
all other code runs in tests without it. This file imports nothing.
"""
