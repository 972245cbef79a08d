"""Offload: main weights, gradients and optimizer state in host memory or in files.

A `StateStore` holds a unit's main weights and optimizer state, and brings them to where the update
runs; a `HostTransfer` copies between device and host. `plan_offload` chooses both.
"""
