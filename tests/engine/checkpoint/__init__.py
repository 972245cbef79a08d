"""Tests of `rayzero.engine.checkpoint`."""
