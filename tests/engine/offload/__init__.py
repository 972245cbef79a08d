"""Offload: parity, the file, the link, errors."""
