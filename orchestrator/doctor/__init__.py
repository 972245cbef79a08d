"""`rayzero doctor`: what of this machine and cluster keeps a job from running, and what to change.

`gather` asks, in processes of their own with a limit each, because what is broken may hang or
crash; `judge` is pure: facts in, findings out. This file imports nothing.
"""
