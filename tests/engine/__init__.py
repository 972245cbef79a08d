"""Tests of `rayzero.engine`."""
