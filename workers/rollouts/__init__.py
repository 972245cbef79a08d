"""Rollouts: samples that generators make of prompts while the trainer trains on them.

`ledger.py` is pure: which prompt is where, and the log that the trainer reads. `server.py` serves
it in the buffer's process; `buffer_client.py` has the trainer's side, `tasks.py` the generators'.
This file imports nothing.
"""
