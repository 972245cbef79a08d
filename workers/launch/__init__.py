"""Runs a script as a job's training function: as `__main__`."""
