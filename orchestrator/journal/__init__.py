"""A job's journal beside its checkpoints: what happened to it, so that a lost run can be adopted.

JSON lines in numbered files, written behind the controller. Reading is pure from lines on.
"""
