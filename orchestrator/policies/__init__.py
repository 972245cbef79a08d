"""Pure decisions: small values in, one small value out. No clock, no I/O, no Ray.

This file imports nothing.
"""
