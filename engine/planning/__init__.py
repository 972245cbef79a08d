"""Estimates a run's memory before it starts: bytes by class, and the settings that fit a GPU.

No model is allocated: the engine is built on the meta device, activations use fake tensors. This
file imports nothing.
"""

USABLE_FRACTION = 0.9
"""The part of a device's memory that a plan may use; the rest is left to the device's context, NCCL
and the allocator's fragmentation."""
