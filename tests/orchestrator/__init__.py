"""Tests of `rayzero.orchestrator`."""
