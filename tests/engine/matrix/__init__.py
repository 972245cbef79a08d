"""Combinations of engine settings against plain PyTorch."""
