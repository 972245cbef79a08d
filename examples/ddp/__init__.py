"""The plain DistributedDataParallel loop, and the same loop with rayzero at stage 0."""
