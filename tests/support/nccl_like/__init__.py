"""NCCL's behaviour on CPUs, for tests: an asynchronous device, and a process group over it.

`queues`: its streams, `stream`: the device, `mesh`: how ranks exchange bytes, `group`: the backend
of `torch.distributed`, `install`: how a worker process gets it.
"""
