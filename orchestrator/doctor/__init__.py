"""`rayzero doctor`: problems of this machine and cluster that keep jobs from running, with fixes.

`collect` runs probes in subprocesses with timeouts, because a broken component may hang or crash.
`diagnose` turns facts into findings, without I/O.
"""
