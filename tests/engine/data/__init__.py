"""Tests of `rayzero.engine.data`."""
