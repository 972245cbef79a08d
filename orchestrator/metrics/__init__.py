"""What a job tells of itself in numbers: the table of series, their sources, and the ways out.

No torch, no Ray. Everything here only listens: nothing that happens in here changes a job.
"""
