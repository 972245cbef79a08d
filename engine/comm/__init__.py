"""The wire. Collectives of torch.distributed are called in this folder only."""
