"""Offload: main weights, gradients and optimizer state in host memory or in files."""
