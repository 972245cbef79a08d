"""Tests that cross packages: whole jobs, the command line, the examples."""
