"""A "cuda:0" that exists for torch's bookkeeping only, under FakeTensor, on a machine without GPU.

torch itself then checks devices, dtypes and shapes as on a GPU, and runs hooks in autograd's
device thread. Nothing has values, so the full size of any model can be trained on paper.

    guard.cpp    makes torch's CPU build believe in one CUDA device
    build        compiles it, and runs a Python module with it
    census       counts bytes of the device, and what the host waits for
    training     trains cases there; finds what torch or NCCL would refuse
    large        the bytes of a rank that trains a model of 8 G parameters
    __main__     does so in a process with the guard
"""
