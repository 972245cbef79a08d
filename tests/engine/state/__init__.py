"""Tests of rayzero.engine.state."""
