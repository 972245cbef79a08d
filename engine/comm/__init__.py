"""Communication between ranks. Only this folder calls torch.distributed's collectives."""
