"""The rooms of the controller: each acts on one thing. They decide nothing that a policy can.

Rooms share a `JobContext`, run in one event loop, and wait for nothing without a limit or a bell.
"""
