"""Estimates a run's memory before it starts: bytes by class, and the settings that fit a GPU.

No model is allocated: parameters are fake tensors, layouts are integers.
"""
