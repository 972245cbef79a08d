"""Metrics of a job: counts of its events, their export to Prometheus, its page, and its step files.

No torch, no Ray. Nothing in this package changes the job.
"""
