"""Tests on one GPU: NCCL, streams, transfers, memory. Skipped without a CUDA device."""
