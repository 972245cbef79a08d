"""What one GPU can prove: the NCCL path, streams, links, memory. Skipped without a CUDA device."""
