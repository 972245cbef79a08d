"""Tests of `rayzero.orchestrator.policies`."""
