"""Estimates a run's memory before it starts: bytes by class, and the settings that fit a GPU.

No model is allocated: the engine is built on the meta device, activations use fake tensors.
"""
