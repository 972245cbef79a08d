"""Whose a job's folder is: a claim in it, renewed while its controller lives.

`protocol` and `claim` are pure; `folder` knows stores, `holding` has the thread.
"""
