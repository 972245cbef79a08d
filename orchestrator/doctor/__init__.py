"""`rayzero doctor`: problems of this machine and cluster that keep jobs from running, with fixes.

`collect` runs probes in subprocesses with timeouts, because what is broken may hang or crash;
`diagnose` is pure: facts in, findings out.
"""
