"""NCCL's behaviour on CPUs, for tests: an asynchronous device, and a process group over it.

`stream`: the device's queue, `mesh`: how ranks exchange bytes, `group`: the backend of
`torch.distributed`, `install`: how a worker process gets it.
"""
