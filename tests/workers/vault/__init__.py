"""Tests of `rayzero.workers.vault`."""
