"""Where every element lies: pure integers, no tensors. Any rank can work out any other's ranges."""
