"""Layouts of units and state: integers only, no tensors. Any rank can compute another's ranges."""
