"""Estimates a run's memory before it starts: bytes by class, and the settings that fit a GPU.

No model is allocated: the engine is built on the meta device, activations use fake tensors. This
file imports nothing.
"""

USABLE_FRACTION = 0.9
"""Of a device's memory; the rest is left to its context, NCCL and the allocator's fragmentation."""
