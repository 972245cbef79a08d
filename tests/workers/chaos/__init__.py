"""Tests of `rayzero.workers.chaos`."""
