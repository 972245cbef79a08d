"""Precision policies, dtypes and the loss scale."""
