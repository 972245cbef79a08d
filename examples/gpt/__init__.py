"""A byte-level GPT that learns to write Python from the source of its standard library."""
