"""The vault: one process a node that keeps what training would lose with a worker.

A slot's buffers are shared memory that a worker writes and its node's vault owns, so they outlive
the worker. Free of torch and Ray: a vault must start fast, and all of it runs in a test. Inside:
the image of a buffer (`header`, `slots`, `images`), the vault's side (`pool`, `shelf`, `server`,
`replicas`, `files`, `vault`), the worker's side (`client`, `source`). This file imports nothing.
"""
