"""Rollouts: samples that generators make from prompts while the trainer trains on them.

`ledger.py` keeps the state of each prompt and the log that the trainer reads, without I/O.
`server.py` serves it in the buffer's process; `buffer_client.py` is the trainer's side, and
`tasks.py` the generators' side. This file imports nothing.
"""
