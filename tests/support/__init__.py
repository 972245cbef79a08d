"""Shared test infrastructure: rank processes, leak checks, scheduling. No product tests."""
