"""Injected faults: their language, and where they strike."""
