"""The control plane: job spec, pure state machine, policies, controller, command line, job API.

No torch, even indirectly: what runs on a worker is named by string. This file imports nothing.
"""
