"""The vault: one process per node that keeps copies of the training state in shared memory.

A worker writes its slots; the vault owns them, so they outlive the worker. Free of torch and,
except for `actor`, of Ray: a vault must start fast, and tests run all of it in one process. This
file imports nothing.
"""
