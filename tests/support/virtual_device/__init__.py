"""A virtual accelerator on CPU tensors, with a happens-before race detector.

Every operator runs at once, so that numbers are right, and is booked as a kernel on the virtual
stream that would have run it, with the bytes that it reads and writes. Vector clocks then tell
whether two accesses are ordered, whatever the timing on a real device would have been.

    timelines   streams, events and host threads: what is ordered before what
    memory      accesses to storages, races, memory that is freed too early, bytes in use
    machine     one rank's timelines and memory, and what its host waited for
    operators   books every operator of torch
    placement   tensors of "cuda:0": which storages are the device's, pinned, or pageable
    nccl        the process group of `NcclBackend`, alone or between ranks in threads
    device      the `Device` of the engine
    rank        runs the engine on all that
"""
