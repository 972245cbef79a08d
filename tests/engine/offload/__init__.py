"""Offload: parity, files, transfers, errors."""
