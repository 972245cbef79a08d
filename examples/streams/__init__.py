"""A byte-level GPT that streams a mixture of source text and documentation from an object store."""
