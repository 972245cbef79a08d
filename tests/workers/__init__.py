"""Tests of `rayzero.workers`."""
