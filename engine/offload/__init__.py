"""What rests elsewhere than on the device: in host memory, or in files.

A `StateStore` says where a unit's main weights, gradient sums and optimizer state rest, and brings them
to where an update can run; a `HostTransfer` moves data between the device and host memory. All of them are
chosen in `factory`; a run without offload has none of this in its way.
"""
