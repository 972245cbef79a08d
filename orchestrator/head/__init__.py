"""A job's own process, the detached actor that its controller runs in, and how others reach it.

What is said between the two is here as data; only `actor` and `reach` know Ray.
"""
