"""Tests of `rayzero.orchestrator.control`, with fake workers in virtual time."""
